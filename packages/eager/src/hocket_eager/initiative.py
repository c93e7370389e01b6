"""The start of a round by messages: the part of the schedule before the activation.

Where the first of the candidates starts a round, each knows for itself that it may. Where it takes the last of them, or
all ranks have to be within a bound, they tell a coordinator, which starts the round when the last has.

Source: eager-SGD (Li et al.), sec. 4.2: "when a process joins the collective (i.e., internal activation), it checks
whether it is the designated initiator: only in that case it keeps running the internal activation".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hocket.api import schedule
from hocket_eager.rules import Quorum, QuorumRules

_CANDIDATE, _FRESH = 0, 1


@dataclass(frozen=True)
class Situation:
    """A rank's view of its own rounds, read by the progress thread.

    Attributes:
        arrived: the number of rounds in which its application has taken part.
        anyone: true once a rank has left for good and nobody can wait for it: then any rank that arrives may start a
            round.
        first_round: the number of the schedule's first round in draws.
    """

    arrived: Callable[[], int]
    anyone: Callable[[], bool]
    first_round: Callable[[], int]


def initiative(rank: int, rules: QuorumRules, coordinator: int, situation: Situation) -> schedule.Schedule:
    """Return this rank's part of the decision that a round starts.

    The schedule ends if this rank is to start the round, and otherwise never.

    Args:
        rank: this rank.
        rules: the rules by which rounds start.
        coordinator: the rank that the others notify, where one is needed.
        situation: this rank's.

    Returns:
        A schedule with the trigger `arrive` that ends with `start`.
    """
    arrive = schedule.NoOp("arrive")
    stand = schedule.Gate("stand", ("arrive",), is_open=_is_candidate(rank, rules, situation))
    anyone = schedule.Gate("anyone", ("arrive",), is_open=lambda round: situation.anyone())
    if not is_coordinated(rules):
        start = schedule.NoOp("start", ("stand", "anyone"), schedule.Logic.ANY)
        return schedule.Schedule((arrive, stand, anyone, start), ("start",), trigger="arrive")
    rest = _agree(rank, rules, situation) if rank == coordinator else _notify(rules, coordinator)
    operations = (arrive, stand, anyone, *_keep_up(rules, situation), *rest)
    return schedule.Schedule(operations, ("start",), trigger="arrive", num_tags=2)


def _is_candidate(rank: int, rules: QuorumRules, situation: Situation) -> Callable[[int], bool]:
    return lambda round: rank in rules.of_round(situation.first_round() + round)


def _keep_up(rules: QuorumRules, situation: Situation) -> list[schedule.Operation]:
    """Return the gate of a rank that is within the bound of staleness, if there is one."""
    bound = rules.staleness
    if bound is None:
        return []
    return [
        schedule.Gate(
            "fresh", is_open=lambda round: situation.arrived() + bound > situation.first_round() + round
        )
    ]


def _notify(rules: QuorumRules, coordinator: int) -> list[schedule.Operation]:
    """Return the notices to the coordinator, and the start without it."""
    operations: list[schedule.Operation] = [
        schedule.Send("stand: tell", ("stand",), to=coordinator, tag=_CANDIDATE)
    ]
    if rules.staleness is not None:
        operations.append(schedule.Send("fresh: tell", ("fresh",), to=coordinator, tag=_FRESH))
    return [*operations, schedule.NoOp("start", ("anyone",))]


def _agree(rank: int, rules: QuorumRules, situation: Situation) -> list[schedule.Operation]:
    """Return the coordinator's start, once all notices that it takes have come."""
    others = [other for other in range(rules.size) if other != rank]
    operations: list[schedule.Operation] = [
        schedule.Receive(f"stand {other}", source=other, tag=_CANDIDATE) for other in others
    ]
    came = {rank: "stand", **{other: f"stand {other}" for other in others}}
    operations.append(schedule.NoOp("first", tuple(came.values()), schedule.Logic.ANY))
    needed = ["first"]
    if rules.starts is Quorum.LAST:
        # Read once a candidate has come, not before: only then has a resumed run certainly set its round.
        for other, name in came.items():
            stands_back = _not(_is_candidate(other, rules, situation))
            absent = schedule.Gate(f"absent {other}", ("first",), is_open=stands_back)
            operations += [absent, schedule.NoOp(f"settled {other}", (name, absent.name), schedule.Logic.ANY)]
            needed.append(f"settled {other}")
    if rules.staleness is not None:
        operations += [schedule.Receive(f"fresh {other}", source=other, tag=_FRESH) for other in others]
        needed += ["fresh", *(f"fresh {other}" for other in others)]
    operations.append(schedule.NoOp("agreed", tuple(needed)))
    return [*operations, schedule.NoOp("start", ("agreed", "anyone"), schedule.Logic.ANY)]


def num_notices(rules: QuorumRules) -> float:
    """Return the number of notices that all ranks send in a round with one initiator, on average over rounds.

    2^ceil(log2 P) - 1 of them call all ranks; the others are for the coordinator.
    """
    size = rules.size
    calls = (1 << (size - 1).bit_length()) - 1
    if not is_coordinated(rules):
        return calls
    fresh = size - 1 if rules.staleness is not None else 0
    return calls + rules.candidates * (size - 1) / size + fresh


def is_coordinated(rules: QuorumRules) -> bool:
    """Return whether it takes a coordinator to know that a round may start."""
    return rules.staleness is not None or (rules.starts is Quorum.LAST and rules.candidates > 1)


def _not(holds: Callable[[int], bool]) -> Callable[[int], bool]:
    return lambda round: not holds(round)
