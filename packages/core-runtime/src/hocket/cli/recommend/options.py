"""What `hocket recommend` is told on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import click

from hocket.config.source import SLOTS, parse_override
from hocket.quantities import bits_per_second, read, seconds

__all__ = ["Asked", "network_options", "network_overrides", "recommend_options"]

#: A latency without a unit that is longer is one in ms or us, more likely.
_LONGEST_LATENCY_S = 1.0
_STRATEGY_KEYS = (*SLOTS, "strategy", "phases", "recipe")


@dataclass(frozen=True)
class Asked:
    """What a user says of what is to be trained, and where.

    Attributes:
        target: a recipe, or a run's file or folder; None for the defaults.
        overrides: of the run's file.
        params: how many parameters the model has, such as 25M; None where a task or `model` says.
        model: `module:function` that returns it.
        hosts: where ranks are, as `parse_hosts` reads it; None for what the run says, on hosts of their own.
        bandwidth, latency: of a host's link, such as 1gbit and 50us.
        step: how long a step computes, such as 200ms.
        late: `1x300ms`: so many ranks, others in each step, are late by so much, with `@10%` in a tenth of the steps;
            or a mapping of `delays`.
        optimizer: by name.
        measure: whether to measure what this machine computes.
        all: whether to rank recipes, too, whose accuracy nobody has measured.
    """

    target: str | None
    overrides: tuple[str, ...]
    params: str | None
    model: str | None
    hosts: str | None
    bandwidth: str | None
    latency: str | None
    step: str | None
    late: str | None
    optimizer: str | None
    measure: bool
    all: bool

    @property
    def names_task(self) -> bool:
        """Whether a run, or an override, says what is trained."""
        is_run = self.target is not None and os.path.exists(self.target)
        return is_run or any(each.startswith("task") for each in self.overrides)

    @property
    def of_strategy(self) -> tuple[str, ...]:
        """The overrides that change a strategy, and are of one row alone."""
        return tuple(each for each in self.overrides if parse_override(each).keys[0] in _STRATEGY_KEYS)

    @property
    def of_run(self) -> tuple[str, ...]:
        """All other overrides, which every row has."""
        return tuple(each for each in self.overrides if each not in self.of_strategy)


def network_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say of the model's size and the network, handed to it by their names."""
    for option in reversed(_NETWORK_OPTIONS):
        command = option(command)
    return command


def network_overrides(bandwidth: str | None, latency: str | None) -> list[str]:
    """Return `--bandwidth` and `--latency` as overrides of a run's file.

    Raises:
        UserError: one is none; says which, and what to write.
    """
    overrides = []
    if bandwidth is not None:
        overrides.append(f"network.bandwidth_bits_per_s={read('--bandwidth', bits_per_second, bandwidth)!r}")
    if latency is not None:
        latency_s = read("--latency", partial(seconds, longest_s=_LONGEST_LATENCY_S), latency)
        overrides.append(f"network.latency_s={latency_s!r}")
    return overrides


_NETWORK_OPTIONS = (
    click.option("--params", metavar="25M", help="How many parameters the model has, in place of a task's."),
    click.option("--bandwidth", metavar="1gbit", help="Of each host's link; default: the run's, 10gbit."),
    click.option("--latency", metavar="50us", help="Of a message; default: the run's, 20us."),
)

_OPTIONS = (
    click.argument("words", nargs=-1, metavar="[RECIPE|FILE.yaml|RUN] [KEY=VALUE]..."),
    *_NETWORK_OPTIONS,
    click.option("--model", metavar="MODULE:FUNCTION", help="What returns the model, in place of --params."),
    click.option("--hosts", metavar="a:8,b:8|4x8|FILE", help="On which hosts the ranks are."),
    click.option("-n", "-np", "--np", "ranks", hidden=True),
    click.option("--step", metavar="200ms", help="How long a step computes."),
    click.option(
        "--late",
        metavar="1x300ms[@10%]",
        help="So many ranks, others in each step (or in 10 % of them), are late by so much; or delays.",
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
    def with_options(words: tuple[str, ...], ranks: str | None, **given: Any) -> Any:
        if ranks is not None:
            raise click.UsageError(
                f"-n: on which hosts the ranks are is what counts here: --hosts {ranks}x1 for {ranks} hosts of one "
                f"rank, --hosts 1x{ranks} for one host"
            )
        targets = [word for word in words if "=" not in word or os.path.exists(word)]
        if len(targets) > 1:
            raise click.UsageError(f"Got {len(targets)} runs: name one, or none.")
        overrides = tuple(word for word in words if word not in targets)
        return command(Asked(target=targets[0] if targets else None, overrides=overrides, **given))

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options
