"""The arguments and options of `hocket recommend`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import click

from hocket.cli.click_parts import Command, add_options
from hocket.config.source import SLOTS, parse_override
from hocket.quantities import bits_per_second, read, seconds

__all__ = ["Asked", "network_options", "network_overrides", "recommend_options"]

#: A latency without a unit above this many seconds was more likely meant in ms or us.
_LONGEST_LATENCY_S = 1.0
_STRATEGY_KEYS = (*SLOTS, "strategy", "phases", "recipe")


@dataclass(frozen=True)
class Asked:
    """The model, hosts and network that `hocket recommend` is asked about.

    Attributes:
        target: a recipe, or a run's file or folder; None for the defaults.
        overrides: the overrides of the run's file.
        params: the number of the model's parameters, such as 25M; None if a task or `model` gives the model.
        model: `module:function` that returns the model.
        hosts: the ranks' hosts, as `parse_hosts` reads them; None for one host for each of the run's ranks.
        bandwidth, latency: those of a host's link, such as 1gbit and 50us.
        step: the time that a step computes, such as 200ms.
        late: late ranks: `1x300ms` for one rank, another in each step, late by 300 ms; with `@10%` in a tenth of the
            steps; or a mapping of `delays`.
        optimizer: the optimizer's name.
        measure: measure this machine's computing.
        all: rank recipes of unmeasured accuracy, too.
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
        """True if a run or an override names the task."""
        is_run = self.target is not None and os.path.exists(self.target)
        return is_run or any(each.startswith("task") for each in self.overrides)

    @property
    def of_strategy(self) -> tuple[str, ...]:
        """The overrides that change a strategy, and concern one row alone."""
        return tuple(each for each in self.overrides if parse_override(each).keys[0] in _STRATEGY_KEYS)

    @property
    def of_run(self) -> tuple[str, ...]:
        """All other overrides, which every row has."""
        return tuple(each for each in self.overrides if each not in self.of_strategy)


def network_options(command: Command) -> Command:
    """Add the options for the model's size and the network to a command."""
    return add_options(command, _NETWORK_OPTIONS)


def network_overrides(bandwidth: str | None, latency: str | None) -> list[str]:
    """Return `--bandwidth` and `--latency` as overrides of a run's file.

    Raises:
        UserError: an option has a wrong value; names it and says what to write.
    """
    overrides = []
    if bandwidth is not None:
        overrides.append(f"network.bandwidth_bits_per_s={read('--bandwidth', bits_per_second, bandwidth)!r}")
    if latency is not None:
        latency_s = read("--latency", partial(seconds, longest_s=_LONGEST_LATENCY_S), latency)
        overrides.append(f"network.latency_s={latency_s!r}")
    return overrides


_NETWORK_OPTIONS = (
    click.option(
        "--params", metavar="25M", help="Number of the model's parameters, in place of a task's model."
    ),
    click.option(
        "--bandwidth", metavar="1gbit", help="Bandwidth of each host's link; default: the run's, 10gbit."
    ),
    click.option("--latency", metavar="50us", help="Latency of a message; default: the run's, 20us."),
)

_OPTIONS = (
    click.argument("words", nargs=-1, metavar="[RECIPE|FILE.yaml|RUN] [KEY=VALUE]..."),
    *_NETWORK_OPTIONS,
    click.option(
        "--model", metavar="MODULE:FUNCTION", help="Function that returns the model, in place of --params."
    ),
    click.option("--hosts", metavar="a:8,b:8|4x8|FILE", help="Hosts of the ranks."),
    click.option("-n", "-np", "--np", "ranks", hidden=True),
    click.option("--step", metavar="200ms", help="Time that a step computes."),
    click.option(
        "--late",
        metavar="1x300ms[@10%]",
        help="Late ranks: 1 rank, drawn anew in each step (or in 10 % of them), by 300 ms; or delays.",
    ),
    click.option(
        "--optimizer", metavar="NAME", help="Optimizer of all strategies; default: each recipe's own."
    ),
    click.option(
        "--measure",
        is_flag=True,
        help="Measure the time of compressing, and of a task's step, on this machine.",
    ),
    click.option("--all", is_flag=True, help="Include recipes whose accuracy has not been measured."),
)


def recommend_options(command: Command) -> Command:
    """Add these options to a command, which gets them as one argument, `asked`."""

    @wraps(command)
    def with_options(words: tuple[str, ...], ranks: str | None, **given: Any) -> object:
        if ranks is not None:
            raise click.UsageError(
                f"-n: name the ranks' hosts instead: --hosts {ranks}x1 for {ranks} hosts of one rank, --hosts "
                f"1x{ranks} for one host"
            )
        targets = [word for word in words if "=" not in word or os.path.exists(word)]
        if len(targets) > 1:
            raise click.UsageError(f"Got {len(targets)} runs: name one, or none.")
        overrides = tuple(word for word in words if word not in targets)
        return command(Asked(target=targets[0] if targets else None, overrides=overrides, **given))

    return add_options(with_options, _OPTIONS)
