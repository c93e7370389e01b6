"""The options of `hocket recommend`."""

from __future__ import annotations

import re

import click

from hocket.cli.click_parts import Command, add_options
from hocket.cli.network_options import network_options, setting_option
from hocket.cli.rank_options import island_option
from hocket.quantities import seconds


def late_ranks(text: str) -> dict[str, object]:
    """Return the delays that a text such as 1x300ms@10% means.

    Raises:
        ValueError: the text has another form.
    """
    found = re.fullmatch(r"(\d+)x([^@]+)(?:@(\d+\.?\d*)%)?", text)
    if found is None:
        forms = "1x300ms (in each step, another rank is 0.3 s late) or 1x300ms@10% (in a tenth of the steps)"
        raise ValueError(f"got {text!r}; allowed: {forms}")
    number, fraction = int(found[1]), float(found[3] or 100) / 100
    return {"name": "random_subset", "count": number, "seconds": seconds(found[2]), "fraction": fraction}


_OPTIONS = (
    click.argument("words", nargs=-1, metavar="[RECIPE|FILE.yaml|RUN] [KEY=VALUE]..."),
    network_options,
    # A number of ranks is answered with the form of hosts.
    click.option("--hosts", "-n", required=True, metavar="4x1|a:8,b:8", help="Hosts; 4x8: 4 with 8 ranks."),
    island_option,
    setting_option("--step", "compute.step_s", seconds, "200ms", "Computing time of a step."),
    setting_option("--late", "delays", late_ranks, "1x300ms[@10%]", "Late ranks, in all or in some steps."),
    click.option("--all", "everything", is_flag=True, help="Also show recipes whose cost was not measured."),
    click.option("--explain", is_flag=True, help="Explain each row, its cost and the assumptions."),
    click.option("--json", "in_json", is_flag=True, help="Print all rows as JSON."),
)


def recommend_options(command: Command) -> Command:
    """Add these options to a command."""
    return add_options(command, _OPTIONS)
