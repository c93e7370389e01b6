"""The search of a rank for the others of its job and attempt, among all users of a store.

Two jobs with one port, by mistake, find one store. A launcher's store outlives an attempt that failed, and launchers'
numbers of an attempt differ between hosts after a death. So rank 0 draws a token for each attempt, and every other rank
registers under it: once, as a second one of that number is another job's, or has found an attempt that is over.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hocket.errors import UserError
from hocket.transport.meeting.islands import meet_islands
from hocket.transport.meeting.rendezvous import Rendezvous
from hocket.transport.meeting.store import CONFLICT, LOOK_EVERY_S, StoreRanks
from hocket.transport.waiting import wait

_ATTEMPT = "attempt"
# Two jobs begin at about the same time, if they share a store at all: so long ranks with different programs wait for
# a word that there are two. One job may have them, too.
_SUSPICION_S = 5.0
_RANK_OPTION = re.compile(r"--?[\w-]*rank(=.*)?")


class Member(NamedTuple):
    """The facts of a rank about its job; JSON.

    Attributes:
        job: its launcher's name for it; empty if it has none.
        size: number of its ranks.
        program: its command and folder, without options that give the rank.
        host: the rank's host.
    """

    job: str
    size: int
    program: str
    host: str

    @classmethod
    def own(cls, rendezvous: Rendezvous) -> Member:
        """Return the facts of this process."""
        words = list(sys.argv)
        for place in range(len(words) - 1, -1, -1):
            if option := _RANK_OPTION.fullmatch(words[place]):
                del words[place : place + (1 if option[1] else 2)]
        program = f"{shlex.join(words)} in {os.getcwd()}"
        return cls(rendezvous.job, rendezvous.size, program, socket.gethostname())


class _AttemptOverError(Exception):
    """The error that an attempt is over, and another one has begun."""


def join_attempt(store: Store, rendezvous: Rendezvous, member: Member | None = None) -> StoreRanks:
    """Return the ranks of this rank's job and attempt; collective.

    Args:
        store: all ranks', and perhaps other jobs'.
        rendezvous: this rank, and its timeout.
        member: the facts of this process.

    Raises:
        UserError: another job uses the store, or islands do not belong together; names both.
        ExchangeTimeoutError: some ranks did not join; names them.
    """
    own = member or Member.own(rendezvous)
    meet_islands(store, rendezvous)
    while True:
        token = _begin(store) if rendezvous.rank == 0 else _present(store, rendezvous)
        if store.add(f"{token}/{rendezvous.rank}", 1) > 1:
            if rendezvous.lasts and _is_followed(store, token, rendezvous):
                continue
            _refuse(
                store, rendezvous, f"a second process is rank {rendezvous.rank} ({own.program} on {own.host})"
            )
        ranks = StoreRanks(PrefixStore(token, store), rendezvous)
        try:
            members = [Member(*facts) for facts in ranks.gather(own, _newest_check(store, token))]
        except _AttemptOverError:
            continue
        _compare(store, rendezvous, members)
        return ranks


def _begin(store: Store) -> str:
    token = secrets.token_hex(8)
    store.set(_ATTEMPT, token)
    return token


def _present(store: Store, rendezvous: Rendezvous) -> str:
    """Return the token of the newest attempt of rank 0."""
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
    """Wait for the attempt after one in which this rank's place is taken; return whether there is one."""
    wait(
        lambda: store.get(_ATTEMPT).decode() != token,
        rendezvous.timeout_s,
        lambda outcome: (
            f"rank {rendezvous.rank} waits for rank 0 to join the job again at the store at {rendezvous.host} port "
            f"{rendezvous.port}: {outcome}"
        ),
    )
    return True


def _newest_check(store: Store, token: str) -> Callable[[], None]:
    """Return a check, which looks now and then, that an attempt is still the newest one."""
    next_s = time.monotonic() + LOOK_EVERY_S

    def check() -> None:
        nonlocal next_s
        if time.monotonic() > next_s:
            next_s = time.monotonic() + LOOK_EVERY_S
            if store.get(_ATTEMPT).decode() != token:
                raise _AttemptOverError

    return check


def _compare(store: Store, rendezvous: Rendezvous, members: Sequence[Member]) -> None:
    """Refuse ranks of several jobs, which differ in name or size, or else in their programs."""
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
        _refuse(store, rendezvous, f"{_describe(0, first)}, and {_describe(rank, members[rank])}")


def _describe(rank: int, member: Member) -> str:
    name = f"job {member.job}, " if member.job else ""
    return f"rank {rank} of {member.size} is {name}`{member.program}` on {member.host}"


def _refuse(store: Store, rendezvous: Rendezvous, fault: str) -> NoReturn:
    store.set(CONFLICT, fault)
    raise UserError(
        f"ranks of two jobs use the store at {rendezvous.host} port {rendezvous.port} ({fault}): "
        f"{rendezvous.of_its_own}"
    )
