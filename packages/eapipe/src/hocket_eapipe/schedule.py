"""The order of a stage's passes over batches: pure functions of the place in the pipeline.

Words: N stages, numbered from 0; batches t = 1, 2, ..., as in the paper; a pass is a batch's forward or backward at
one stage. A stage's *program* is the order of its own passes. What a stage computes depends on its own program and on
what its neighbours hand over for each batch, and on nothing else: so any execution in which every stage keeps to its
program gives the same numbers, be it N processes at once or one process that goes through all stages in turn.

Source: "Pipeline Parallelism With Elastic Averaging", 2024, sec. III.A and Fig. 1, after
D. Narayanan et al., "PipeDream", 2019, sec. 3.2 (one forward, one backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class PassKind(StrEnum):
    """The kinds of a batch's passes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Pass:
    """A batch's forward or backward at one stage."""

    kind: PassKind
    batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}"


def warm_up(stage: int, num_stages: int) -> int:
    """Return the number of forwards by which a stage is ahead: those of the initial phase except the last."""
    return num_stages - 1 - stage


def program(ahead: int, num_batches: int) -> list[Pass]:
    """Return a stage's passes, in order.

    Args:
        ahead: its `warm_up`; 0 where each batch's backward follows its forward.
        num_batches: T, 0 or more, also fewer than stages.
    """
    passes = []
    for batch in range(1, num_batches + 1):
        passes.append(Pass(PassKind.FORWARD, batch))
        if batch > ahead:
            passes.append(Pass(PassKind.BACKWARD, batch - ahead))
    done = max(0, num_batches - ahead)
    passes += [Pass(PassKind.BACKWARD, batch) for batch in range(done + 1, num_batches + 1)]
    return passes


def phases(passes: Sequence[Pass]) -> tuple[int, int, int]:
    """Return the number of passes in a program's initial phase (forwards), steady phase and final phase."""
    kinds = [each.kind for each in passes]
    if PassKind.BACKWARD not in kinds:
        return len(kinds), 0, 0
    initial = kinds.index(PassKind.BACKWARD)
    final = kinds[::-1].index(PassKind.FORWARD)
    return initial, len(kinds) - initial - final, final


def replica_of(batch: int, num_replicas: int) -> int:
    """Return the replica, from 0, that a batch uses at every stage, in both passes: (t - 1) mod N."""
    return (batch - 1) % num_replicas


def pulls(batch: int, num_replicas: int, period: int) -> bool:
    """Return whether replica and master pull each other after a batch's backward: ceil(t / N) is a multiple of tau."""
    return -(-batch // num_replicas) % period == 0


def timeline(num_stages: int, num_batches: int) -> list[dict[int, Pass]]:
    """Return each stage's passes over time, if each pass takes one unit of time and messages take none.

    Returns:
        For each stage its passes by the time at which they begin.

    Raises:
        AssertionError: the programs wait for each other for ever; they never do.
    """
    programs = [program(warm_up(stage, num_stages), num_batches) for stage in range(num_stages)]
    ended: dict[tuple[int, Pass], int] = {}
    table: list[dict[int, Pass]] = [{} for _ in programs]
    positions = [0] * num_stages
    free = [0] * num_stages
    while any(position < len(passes) for position, passes in zip(positions, programs, strict=True)):
        advanced = False
        for stage, passes in enumerate(programs):
            while positions[stage] < len(passes):
                each = passes[positions[stage]]
                ready = _ready(stage, num_stages, each, ended)
                if ready is None:
                    break
                start = max(ready, free[stage])
                table[stage][start] = each
                ended[stage, each] = free[stage] = start + 1
                positions[stage] += 1
                advanced = True
        assert advanced, f"{num_stages} stages and {num_batches} batches: no stage can go on at {positions}"
    return table


def _ready(stage: int, num_stages: int, each: Pass, ended: dict[tuple[int, Pass], int]) -> int | None:
    """Return the time at which a pass has all inputs from its neighbours; None while it is not known."""
    if each.kind is PassKind.FORWARD:
        return 0 if stage == 0 else ended.get((stage - 1, each))
    # The stage's own forward comes before it in its program.
    return 0 if stage == num_stages - 1 else ended.get((stage + 1, each))
