"""What `hocket recommend` is told on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

__all__ = ["Asked", "recommend_options"]


@dataclass(frozen=True)
class Asked:
    """What a user says of what is to be trained, and where.

    Attributes:
        target: a run's folder or file; None for the defaults.
        overrides: of the run's file.
        params: how many parameters the model has, such as 25M; None where a task or `model` says.
        model: `module:function` that returns it.
        hosts: where ranks are, as `parse_hosts` reads it; None for what the run says, on hosts of their own.
        bandwidth, latency: of a rank's link, such as 1gbit and 50us.
        step_s: seconds that a step computes.
        late: `1x0.3`: so many ranks, others in each step, are late by so many seconds; or a mapping of `delays`.
        optimizer: by name.
        measure: whether to measure what this machine computes.
        all: whether to rank recipes, too, whose accuracy nobody has measured.
    """

    target: Path | None
    overrides: tuple[str, ...]
    params: str | None
    model: str | None
    hosts: str | None
    bandwidth: str | None
    latency: str | None
    step_s: float | None
    late: str | None
    optimizer: str | None
    measure: bool
    all: bool

    @property
    def names_task(self) -> bool:
        """Whether a run, or an override, says what is trained."""
        return self.target is not None or any(each.startswith("task") for each in self.overrides)


_OPTIONS = (
    click.argument("words", nargs=-1, metavar="[RUN|FILE.yaml] [KEY=VALUE]..."),
    click.option("--params", metavar="25M", help="How many parameters the model has."),
    click.option("--model", metavar="MODULE:FUNCTION", help="What returns the model, in place of --params."),
    click.option("--hosts", metavar="a:8,b:8|4x8|FILE", help="On which hosts the ranks are."),
    click.option("--bandwidth", metavar="1gbit", help="Of each rank's link; default: the run's, 10gbit."),
    click.option("--latency", metavar="50us", help="Of a message; default: the run's, 20us."),
    click.option(
        "--step",
        "step_s",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="How long a step computes.",
    ),
    click.option(
        "--late",
        metavar="1x0.3",
        help="So many ranks, others in each step, are late by so many seconds; or delays.",
    ),
    click.option("--optimizer", metavar="NAME", help="For all of them; default: each recipe's own."),
    click.option(
        "--measure", is_flag=True, help="Take this machine's time for compressing, and for a task's step."
    ),
    click.option("--all", is_flag=True, help="Recipes, too, whose accuracy has not been measured."),
)


def recommend_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options, handed to it as `asked`, an Asked."""

    @wraps(command)
    def with_options(words: tuple[str, ...], **given: Any) -> Any:
        targets = [word for word in words if "=" not in word or Path(word).exists()]
        if len(targets) > 1:
            raise click.UsageError(f"Got {len(targets)} runs: name one, or none.")
        overrides = tuple(word for word in words if word not in targets)
        return command(Asked(target=Path(targets[0]) if targets else None, overrides=overrides, **given))

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options
