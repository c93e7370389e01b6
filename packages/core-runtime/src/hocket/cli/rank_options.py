"""The options of commands that start ranks: their number, hosts, transport and launcher."""

from __future__ import annotations

from functools import wraps

import click

from hocket.cli.click_parts import Command, Option, add_options
from hocket.cli.wanted_ranks import WantedRanks
from hocket.launch.hosts import MOST_RANKS

_VIRTUAL = " (virtual: they are threads of one process)"


def island_overrides(island: int | None) -> list[str]:
    """Return `--island` as overrides of a run's file."""
    return [] if island is None else [f"island.shard={island}", "island.replicate=1", "island.tensor=1"]


island_option: Option = click.option(
    "--island",
    type=click.IntRange(1, MOST_RANKS),
    callback=lambda _context, _parameter, island: island_overrides(island),
    help="Number of ranks that shard a replica (FSDP2, tensor parallelism); default: from the file or run, else 1.",
)


def ranks_option(default: str) -> Option:
    """Return the option for the number of ranks, spelt as by mpiexec and others."""
    words = f"Number of ranks; default: {default}."
    return click.option("-n", "-np", "--np", "ranks", type=click.IntRange(1, MOST_RANKS), help=words)


def rank_options(
    ranks: str,
    transport: str = "from the file, else torch between hosts, and mpi on one host if installed",
    *,
    transports: tuple[str, ...] = ("mpi", "torch", "virtual"),
) -> Option:
    """Add these options to a command, which gets them as one argument, `wanted`.

    Args:
        ranks, transport: the defaults, in words.
        transports: the transports to choose from.
    """
    options = (
        ranks_option(ranks),
        click.option(
            "--transport",
            type=click.Choice(transports),
            help=f"Transport between the ranks{_VIRTUAL * ('virtual' in transports)}; default: {transport}.",
        ),
        click.option(
            "--hosts",
            metavar="a:8,b:8|FILE",
            help="Hosts of the ranks, and the number on each; a hostfile has a line `a slots=8` for each host.",
        ),
        click.option(
            "--mpi-arg",
            "mpi_args",
            multiple=True,
            metavar="WORDS",
            help="Further arguments of mpiexec; may be repeated.",
        ),
    )

    def add(command: Command) -> Command:
        @wraps(command)
        def with_options(
            ranks: int | None,
            hosts: str | None,
            transport: str | None,
            mpi_args: tuple[str, ...],
            **given: object,
        ) -> object:
            return command(**given, wanted=WantedRanks.of(ranks, hosts, transport, mpi_args))

        return add_options(with_options, options)

    return add
