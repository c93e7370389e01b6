"""The faults to inject, and their draws from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import NamedTuple

from hocket.draws import check_seed, words


@dataclass(frozen=True)
class KillAt:
    """The moment of a rank's death: its `call`-th use of the transport after its `step`-th step.

    A use is an operation on a lane, or a call of `lane`, `group` or `allgather_bytes`.

    Attributes:
        rank: the rank, numbered as in the world.
        step: number of steps that it has reported before, by `Status.note_step`.
        call: number of uses since then that it survives.
    """

    rank: int
    step: int = 0
    call: int = 0


class Fate(NamedTuple):
    """The faults of one operation.

    Attributes:
        delay_s: time that it is held back, in seconds.
        overtaken: whether the rank's next message to elsewhere goes first.
        dropped: whether it never begins, while its sender believes it done.
    """

    delay_s: float
    overtaken: bool
    dropped: bool


@dataclass(frozen=True)
class FaultPlan:
    """Faults to inject; none by default.

    Two messages of one pair, lane and round stay in order, and so do a lane's collectives. Collectives are delayed at
    their start on each rank separately, never dropped or overtaken. Lanes on devices have collectives alone, exchanges
    with neighbours included, and a rank's keep their order over all of them.

    Attributes:
        seed: of the draws, 0 to 2**64 - 1.
        delay_s: the shortest and the longest delay of an operation, in seconds; uniform between them.
        reorder: the probability that a message waits, 1 ms at most, until the rank's next one has overtaken it.
        drop: the probability that a message is lost.
        kill: the rank that dies, and the moment.
        lanes: a pattern, as of file names, of the lanes whose operations are delayed, reordered and dropped.

    Raises:
        ValueError: a seed, a delay or a probability is not in its range.
    """

    seed: int = 0
    delay_s: tuple[float, float] = (0.0, 0.0)
    reorder: float = 0.0
    drop: float = 0.0
    kill: KillAt | None = None
    lanes: str = "*"

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not 0 <= self.delay_s[0] <= self.delay_s[1] < float("inf"):
            raise ValueError(
                f"delay_s is {self.delay_s}; allowed: two finite times of 0 or more, the shorter first"
            )
        for name in ("reorder", "drop"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 to 1")

    def fate(self, kind: str, lane: str, source: int, to: int, round: int, number: int = 0) -> Fate:
        """Return an operation's faults, a pure function of the arguments and the seed.

        Args:
            kind: `send` for a message; else the collective.
            lane: its name.
            source: the rank of the world that begins it.
            to: the rank of the world that receives it; -1 for a collective.
            round: the message's, or a collective's number in its lane.
            number: number of earlier messages of the same pair, lane and round.
        """
        if not fnmatchcase(lane, self.lanes):
            return Fate(0.0, False, False)
        address = f"{kind} {source} {to} {number} {lane}".encode()
        segment = int.from_bytes(blake2b(address, digest_size=8).digest(), "big")
        delay, reorder, drop = words(3, "faults", self.seed, round, segment) * 2.0**-64
        low, high = self.delay_s
        sent = kind == "send"
        return Fate(
            low + float(delay) * (high - low),
            sent and bool(reorder < self.reorder),
            sent and bool(drop < self.drop),
        )
