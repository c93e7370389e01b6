"""How a rank finds the other ranks of its job, and of this attempt at it, among all that ever use a store.

Two jobs that were given one port by mistake find one store. A launcher's store outlives an attempt that failed, and
what launchers call an attempt differs between hosts after a death. So rank 0 draws a token for each attempt, and every
other rank takes its place under it: once, for a second one of that number is another job's, or finds an attempt that is
over.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hocket.errors import UserError
from hocket.transport.meeting.rendezvous import Rendezvous
from hocket.transport.meeting.store import CONFLICT, LOOK_EVERY_S, StoreRanks
from hocket.transport.waiting import wait

__all__ = ["Member", "join_attempt"]

_ATTEMPT = "attempt"
# Two jobs begin at about the same time, if their ranks can meet at all: so long ranks with different programs wait for
# a word that there are two. One job may have them, too.
_SUSPICION_S = 5.0
_RANK_OPTION = re.compile(r"--?[\w-]*rank(=.*)?")


class Member(NamedTuple):
    """What a rank says of the job that it belongs to; JSON.

    Attributes:
        job: what its launcher calls it; empty where it has no name.
        size: how many ranks it has.
        program: its command and folder, but for options that say which rank this is.
        host: where it runs.
    """

    job: str
    size: int
    program: str
    host: str

    @classmethod
    def own(cls, rendezvous: Rendezvous) -> Member:
        """Return what this process says."""
        words = list(sys.argv)
        for place in range(len(words) - 1, -1, -1):
            if option := _RANK_OPTION.fullmatch(words[place]):
                del words[place : place + (1 if option[1] else 2)]
        program = f"{shlex.join(words)} in {os.getcwd()}"
        return cls(rendezvous.job, rendezvous.size, program, socket.gethostname())


class _AttemptOverError(Exception):
    """The attempt is over, and another one has begun."""


def join_attempt(store: Store, rendezvous: Rendezvous, member: Member | None = None) -> StoreRanks:
    """Return the ranks of this rank's job and attempt; collective.

    Args:
        store: all ranks', and perhaps other jobs'.
        rendezvous: this rank, and its time.
        member: this process, in words.

    Raises:
        UserError: another job uses the store; says whose.
        ExchangeTimeoutError: some ranks did not come; names them.
    """
    own = member or Member.own(rendezvous)
    while True:
        token = _begin(store) if rendezvous.rank == 0 else _present(store, rendezvous)
        if store.add(f"{token}/{rendezvous.rank}", 1) > 1:
            if rendezvous.lasts and _is_followed(store, token, rendezvous):
                continue
            _refuse(
                store, rendezvous, f"a second rank {rendezvous.rank} has come ({own.program} on {own.host})"
            )
        ranks = StoreRanks(PrefixStore(token, store), rendezvous)
        look = _Look(store, token)
        try:
            members = [Member(*told) for told in ranks.gather(own, look.check)]
        except _AttemptOverError:
            continue
        _compare(store, rendezvous, members)
        return ranks


def _begin(store: Store) -> str:
    token = secrets.token_hex(8)
    store.set(_ATTEMPT, token)
    return token


def _present(store: Store, rendezvous: Rendezvous) -> str:
    """Return the token of the attempt that rank 0 has begun last."""
    wait(
        lambda: bool(store.check([_ATTEMPT])),
        rendezvous.timeout_s,
        lambda outcome: (
            f"rank {rendezvous.rank} waits for rank 0 of {rendezvous.size} to join the job at the store at "
            f"{rendezvous.host} port {rendezvous.port}: {outcome}"
        ),
    )
    return str(store.get(_ATTEMPT).decode())


def _is_followed(store: Store, token: str, rendezvous: Rendezvous) -> bool:
    """Wait for the attempt after one in which this rank's place is taken, as its process has ended."""
    wait(
        lambda: store.get(_ATTEMPT).decode() != token,
        rendezvous.timeout_s,
        lambda outcome: (
            f"rank {rendezvous.rank} waits for rank 0 to join the job again at the store at {rendezvous.host} port "
            f"{rendezvous.port}: {outcome}"
        ),
    )
    return True


class _Look:
    """Looks now and then whether an attempt is still the present one, and whether ranks of two jobs have met."""

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._token = store, token
        self._next_s = time.monotonic() + LOOK_EVERY_S

    def check(self) -> None:
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + LOOK_EVERY_S
            if self._store.get(_ATTEMPT).decode() != self._token:
                raise _AttemptOverError


def _compare(store: Store, rendezvous: Rendezvous, members: Sequence[Member]) -> None:
    """Refuse ranks of several jobs: told apart by their name or size, or by their programs where there is more."""
    first = members[0]
    others = [rank for rank, member in enumerate(members) if member[:2] != first[:2]]
    suspects = [rank for rank, member in enumerate(members) if member.program != first.program]
    if not others and suspects:
        end_s = time.monotonic() + _SUSPICION_S
        while not others and time.monotonic() < end_s:
            time.sleep(LOOK_EVERY_S)
            others = suspects if store.check([CONFLICT]) else []
    if others:
        rank = rendezvous.rank if rendezvous.rank in others else others[0]
        _refuse(store, rendezvous, f"{_told(0, first)}, and {_told(rank, members[rank])}")


def _told(rank: int, member: Member) -> str:
    name = f"job {member.job}, " if member.job else ""
    return f"rank {rank} of {member.size} is {name}`{member.program}` on {member.host}"


def _refuse(store: Store, rendezvous: Rendezvous, told: str) -> NoReturn:
    store.set(CONFLICT, told)
    raise UserError(
        f"ranks of two jobs meet at the store at {rendezvous.host} port {rendezvous.port}: {told}: give each job a "
        "MASTER_PORT of its own"
    )
