"""The contract of partial sums (eager-SGD, Lemma 6.1): what ranks do to test it, and what must hold of what they tell.

The gradient of rank i in step t is 1 at a place of its own, and 0 elsewhere: so each result shows which gradients are
in it, and a sum of float32 is exact in any order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.progress import ThreadProgress
from hocket.transport.peer import Peer
from hocket_eager import Delivery, PartialAllreduce, Quorum


@dataclass(frozen=True)
class Case:
    """The program of ranks.

    Attributes:
        size: the number of ranks.
        collective: the fields of `PartialAllreduce`.
        steps: of the application of each rank; a rank with fewer leaves before the others.
        nulls: from which step on each rank has no data left, and proposes nothing, at once.
        segments: how many are in flight in a step.
        pace: how long a step of each rank takes at most, in milliseconds.
        seed: of the times.
    """

    size: int
    collective: Mapping[str, Any]
    steps: list[int]
    nulls: list[int]
    segments: int = 1
    pace: list[float] = field(default_factory=list)
    seed: int = 0

    @property
    def component(self) -> PartialAllreduce:
        return PartialAllreduce(
            **{
                **self.collective,
                "starts": Quorum(self.collective.get("starts", "first")),
                "missed": Delivery(self.collective.get("missed", "newest")),
            }
        )

    @property
    def most_steps(self) -> int:
        return max(self.steps)

    def place(self, rank: int, step: int) -> int:
        return rank * self.most_steps + step

    def computes(self, rank: int, step: int) -> bool:
        return step < min(self.steps[rank], self.nulls[rank])


def take_part(peer: Peer, plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Carry out a case on this rank; tell of each segment what was handed out in each step, and what is left."""
    case = Case(**plain)
    draw = random.Random(f"{case.seed} {peer.rank}")
    like = np.zeros(case.size * case.most_steps, np.float32)
    progress = ThreadProgress()
    sums, close = case.component.open_sums(
        peer, progress, "tested", [(f"tested[{i}]", i, like) for i in range(case.segments)]
    )
    told: list[dict[str, Any]] = [{"handed": []} for _ in sums]
    for step in range(case.steps[peer.rank]):
        gradient = like.copy()
        if case.computes(peer.rank, step):
            gradient[case.place(peer.rank, step)] = 1
        for index in draw.sample(sorted(sums), len(sums)):
            if step < case.nulls[peer.rank]:
                _pass_time(peer, draw.random() * case.pace[peer.rank] * 1e-3 / len(sums))
            sums[index].propose(gradient, step)
        for index in draw.sample(sorted(sums), len(sums)):
            sums[index].wait(step)
            out = np.full_like(like, np.nan)
            outcome = sums[index].fetch(step, out)
            told[index]["handed"].append(
                {
                    "round": outcome.round,
                    "included": outcome.included,
                    "active": outcome.num_active,
                    "result": np.flatnonzero(out).tolist(),
                    "ones": bool(np.isin(out, (0, 1)).all()),
                    "staleness": outcome.staleness,
                }
            )
    for of_segment in sums.values():
        of_segment.close()
    close()
    progress.close()
    for index, of_segment in sums.items():
        told[index]["left"] = np.flatnonzero(of_segment.left()[1]).tolist()
    return told


def check(case: Case, told: list[list[dict[str, Any]]]) -> None:
    """Assert the contract and conservation of what all ranks tell, segment by segment."""
    for segment in range(case.segments):
        _check_segment(case, [rank[segment] for rank in told])


def _check_segment(case: Case, told: list[dict[str, Any]]) -> None:
    component = case.component
    rules = component.rules(case.size)
    for rank, of_rank in enumerate(told):
        handed = of_rank["handed"]
        assert len(handed) == case.steps[rank]
        for step, one in enumerate(handed):
            assert one["ones"], "a gradient went in twice"
            assert step <= one["round"] < case.most_steps
            if case.computes(rank, step):
                assert one["included"] == (case.place(rank, step) in one["result"]), "not told the truth"
    if component.missed is Delivery.NEWEST:
        _check_rounds(case, told)
    else:
        _check_sums(case, told)
    # Nobody has to be late where a round waits for all.
    waits_for_all = (rules.starts is Quorum.LAST and rules.candidates == rules.size) or rules.staleness == 0
    if waits_for_all and len(set(case.steps)) == 1:
        assert all(one["included"] for of_rank in told for one in of_rank["handed"])


def _check_rounds(case: Case, told: list[dict[str, Any]]) -> None:
    rules = case.component.rules(case.size)
    nobody_leaves = len(set(case.steps)) == 1
    rounds: dict[int, Any] = {}
    for of_rank in told:
        for one in of_rank["handed"]:
            seen = (one["result"], one["active"])
            assert rounds.setdefault(one["round"], seen) == seen, "ranks differ in a round's result"
    everything = [place for result, _ in rounds.values() for place in result]
    everything += [place for of_rank in told for place in of_rank["left"]]
    assert len(everything) == len(set(everything)), "a gradient is in two rounds"
    if len(rounds) == case.most_steps:
        assert set(everything) == _computed(case), "a gradient is lost"
    latest = dict.fromkeys(range(case.size), 0)
    for round, (result, active) in rounds.items():
        steps = [divmod(place, case.most_steps) for place in result]
        for rank, step in steps:
            late = round - step
            assert late >= 0
            latest[rank] = max(latest[rank], late)
            if case.component.staleness is not None and nobody_leaves:
                assert late <= case.component.staleness
        fresh = {rank for rank, step in steps if step == round}
        proposed_nothing = {rank for rank in range(case.size) if not case.computes(rank, round)}
        assert len(fresh) <= active <= len(fresh | proposed_nothing)
        assert active >= 1, "no rank had come"
        candidates = rules.of_round(round)
        if nobody_leaves:
            came = candidates & (fresh | proposed_nothing)
            assert came if rules.starts is Quorum.FIRST else came == candidates
    if len(rounds) == case.most_steps and nobody_leaves and min(case.nulls) >= case.most_steps:
        for rank, of_rank in enumerate(told):
            if of_rank["handed"]:
                assert of_rank["handed"][-1]["staleness"] == latest[rank]


def _check_sums(case: Case, told: list[dict[str, Any]]) -> None:
    left = {place for of_rank in told for place in of_rank["left"]}
    for rank, of_rank in enumerate(told):
        handed = [place for one in of_rank["handed"] for place in one["result"]]
        assert len(handed) == len(set(handed))
        if case.steps[rank] == case.most_steps:
            assert set(handed) | left == _computed(case), "a gradient is lost"
            assert not set(handed) & left


def _computed(case: Case) -> set[int]:
    return {
        case.place(rank, step)
        for rank in range(case.size)
        for step in range(case.most_steps)
        if case.computes(rank, step)
    }


def _pass_time(peer: Peer, seconds: float) -> None:
    if peer.transport == "virtual":
        peer.clock.elapse(seconds)
    else:
        time.sleep(seconds)
