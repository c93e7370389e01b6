"""The options of `hocket recommend`."""

from __future__ import annotations

import click

from hocket.cli.click_parts import Command, add_options
from hocket.cli.network_options import network_options
from hocket.cli.rank_options import island_option

_OPTIONS = (
    click.argument("words", nargs=-1, metavar="[RECIPE|FILE.yaml|RUN] [KEY=VALUE]..."),
    network_options,
    click.option("--hosts", metavar="a:8,b:8|4x8|FILE", help="Hosts of the ranks."),
    island_option,
    click.option("-n", "-np", "--np", "ranks", hidden=True),
    click.option("--step", metavar="200ms", help="Time that a step computes."),
    click.option(
        "--late",
        metavar="1x300ms[@10%]",
        help="Late ranks: 1 rank, drawn anew in each step (or in 10 % of them), by 300 ms.",
    ),
    click.option(
        "--optimizer", metavar="NAME", help="Optimizer of all strategies; default: each recipe's own."
    ),
    click.option(
        "--measure",
        is_flag=True,
        help="Measure the time of compressing, and of a task's step, on this machine.",
    ),
    click.option(
        "--all", "everything", is_flag=True, help="Show all recipes, those of unmeasured cost included."
    ),
    click.option(
        "--explain",
        is_flag=True,
        help="Say of each row what it changes, what that cost in which test, and what is assumed.",
    ),
    click.option("--json", "in_json", is_flag=True, help="Print all rows as JSON."),
)


def recommend_options(command: Command) -> Command:
    """Add these options to a command."""
    return add_options(command, _OPTIONS)
