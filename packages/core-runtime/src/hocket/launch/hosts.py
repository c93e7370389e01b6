"""Hosts with their numbers of ranks, as users write them: `a:8,b:8`, `4x8`, or the name of a hostfile."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import UserError

_FORMS = "a:8,b:8, or 4x8 (4 hosts of 8), or a file with a line `a slots=8` for each"
_GRID = re.compile(r"(\d{1,18})x(\d{1,18})")
# A name, or an address of IPv6 in brackets; and how many ranks.
_ENTRY = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:,=\[\]]{1,253})(?::(\d{1,18}))?")
_LINE = re.compile(_ENTRY.pattern + r"(?:\s+slots\s*=\s*(\d{1,18}))?(?:\s+max[-_]slots\s*=\s*\d+)?")


#: No job has more ranks: what is planned for each of them takes seconds.
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Host:
    """A host, with the number of ranks that run on it.

    Attributes:
        name: its name for other hosts; empty where only numbers were given.
        ranks: number of ranks.
    """

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}:{self.ranks}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts that a text names, each with its places for ranks, by default 1.

    Args:
        text: `a:8,b:8`; `4x8`; or the name of a hostfile, as Open MPI's (`a slots=8`) or MPICH's (`a:8`) mpiexec
            reads it.

    Raises:
        UserError: the text has no such form; says where.
    """
    if (grid := _GRID.fullmatch(text)) is not None:
        _check_number(int(grid[1]) * int(grid[2]), f"hosts {text!r}")
        hosts, where = [Host("", int(grid[2]))] * int(grid[1]), f"hosts {text!r}"
    elif os.path.isfile(text):  # Path.is_file raises for a long name
        hosts, where = _of_file(Path(text)), f"hostfile {text}"
    elif text.isdecimal():
        raise UserError(
            f"hosts {text!r}: write {text}x1 for {text} hosts of one rank, or 1x{text} for {text} ranks on one host"
        )
    else:
        hosts, where = [_entry(part, f"hosts {text!r}") for part in text.split(",")], f"hosts {text!r}"
    if not hosts or any(host.ranks < 1 for host in hosts):
        raise UserError(f"{where}: give each host 1 rank or more")
    _check_number(sum(host.ranks for host in hosts), where)
    names = [host.name for host in hosts if host.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: {', '.join(twice)} is named twice: name it once, with its number of ranks")
    return tuple(hosts)


def _check_number(ranks: int, where: str) -> None:
    if ranks > MOST_RANKS:
        raise UserError(f"{where}: {ranks} ranks, but Hocket plans and starts at most {MOST_RANKS}")


def share_out(hosts: Sequence[Host], ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts with the ranks to start: one host is filled after the other; None fills all.

    Raises:
        UserError: the hosts have fewer places.
    """
    places = sum(host.ranks for host in hosts)
    left = places if ranks is None else ranks
    if left > places:
        raise UserError(
            f"-n {ranks}, but the hosts have slots for only {places} ranks: give a host more slots, such as "
            f"{hosts[0].name or 'a'}:{-(-left // len(hosts))}"
        )
    shared = []
    for host in hosts:
        if left > 0:
            shared.append(Host(host.name, min(host.ranks, left)))
        left -= host.ranks
    return tuple(shared)


def are_here(hosts: Sequence[Host]) -> bool:
    """Return whether all ranks run on this host, as those of a host without a name do."""
    own = socket.gethostname()
    here = {"", "localhost", "127.0.0.1", "::1", "[::1]", own, own.partition(".")[0]}
    return all(host.name in here for host in hosts)


def _of_file(path: Path) -> list[Host]:
    hosts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"hostfile {path} cannot be read: {reason}") from error
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise UserError(
                f"hostfile {path}, line {number}: {text!r} is not of the form `a slots=8` or `a:8`"
            )
        hosts.append(Host(found[1], int(found[2] or found[3] or 1)))
    return hosts


def _entry(text: str, where: str) -> Host:
    found = _ENTRY.fullmatch(text.strip())
    if found is None or "/" in text:
        missing = ", and there is no such file" if "/" in text else ""
        raise UserError(f"{where}: {text!r} is not a host{missing}; write {_FORMS}")
    return Host(found[1], int(found[2] or 1))
