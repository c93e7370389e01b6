"""Islands that are jobs of their own, each with its launcher, joined to one job by three variables.

Island i of n has HOCKET_ISLAND=i and HOCKET_ISLANDS=n. All have HOCKET_MEET=HOST:PORT, where rank 0 of island 0
runs the store in which all ranks meet. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hocket.errors import UserError
from hocket.transport.launchers import Launched, find_launched, ports_of
from hocket.transport.meeting import Rendezvous

_ISLAND, _ISLANDS, _MEET = "HOCKET_ISLAND", "HOCKET_ISLANDS", "HOCKET_MEET"
_WHOLE = f"{_ISLAND}=0 {_ISLANDS}=2 {_MEET}=HOST:PORT"


def find_in_islands(environment: Mapping[str, str]) -> Launched | None:
    """Return the facts of this process among all islands; those of its launcher alone where there is one job.

    A launcher is started with the variables, too, and has no rank.

    Args:
        environment: as `os.environ`.

    Raises:
        UserError: as in `find_launched`, or the variables of islands do not belong together.
    """
    found = find_launched(environment)
    given = [name for name in (_ISLAND, _ISLANDS, _MEET) if environment.get(name)]
    if not given:
        return found
    if len(given) < 3:
        raise UserError(
            f"{' and '.join(given)} in the environment: islands as separate jobs need three variables, such as "
            f"{_WHOLE}"
        )
    island, islands = (_number(environment, name) for name in (_ISLAND, _ISLANDS))
    if not island < islands:
        raise UserError(
            f"{_ISLAND}={island} in the environment: {islands} islands are numbered 0 to {islands - 1}"
        )
    if found is None and "RANK" not in environment:
        return None  # a launcher itself
    own = found or Launched("whoever set RANK", 0, 1)
    rank, size = island * own.size + own.rank, islands * own.size
    host, port = _meeting(environment[_MEET])
    there = Rendezvous(
        rank, size, host, port, "hocket/islands", rank == 0, ports_of(environment), islands=islands
    )
    return replace(own, rank=rank, size=size, transports=("torch",), rendezvous=there) if size > 1 else None


def refuse_without_ranks(environment: Mapping[str, str]) -> None:
    """Refuse a program that joins, or runs all ranks, in a process of an island that no launcher has started.

    Raises:
        UserError: the variables of islands are set.
    """
    if environment.get(_ISLANDS):
        raise UserError(
            f"{_ISLAND} in the environment makes this job one of several islands, but no launcher started this "
            "process: start the script on each island with torchrun or `hocket launch`, or unset HOCKET_ISLAND, "
            "HOCKET_ISLANDS and HOCKET_MEET"
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", environment[name]):
        raise UserError(f"{name}={environment[name]!r} in the environment is not a number")
    return int(environment[name])


def _meeting(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[?([^\s/\[\]]+)\]?:([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise UserError(
            f"{_MEET}={text!r} in the environment: write the first island's host and a free port as HOST:PORT"
        )
    return found[1], int(found[2])
