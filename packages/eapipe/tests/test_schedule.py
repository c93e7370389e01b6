"""The schedule: what each stage does when, against tables written by hand, and its rules for any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket_eapipe.schedule import Pass, PassKind, phases, program, pulls, replica_of, timeline, warm_up

# Fig. 1 as tables: a column is a unit of time, in which a pass of any stage takes place; a dot is an idle one.
TABLES = {
    (1, 3): ["F1 B1 F2 B2 F3 B3"],
    (2, 4): [
        "F1 F2 .  B1 F3 B2 F4 B3 .  B4",
        ".  F1 B1 F2 B2 F3 B3 F4 B4",
    ],
    (3, 4): [
        "F1 F2 F3 .  .  B1 F4 B2 .  B3 .  B4",
        ".  F1 F2 .  B1 F3 B2 F4 B3 .  B4",
        ".  .  F1 B1 F2 B2 F3 B3 F4 B4",
    ],
    (4, 2): [
        "F1 F2 .  .  .  .  .  B1 .  B2",
        ".  F1 F2 .  .  .  B1 .  B2",
        ".  .  F1 F2 .  B1 .  B2",
        ".  .  .  F1 B1 F2 B2",
    ],
}


def drawn(table: list[dict[int, Pass]]) -> list[str]:
    rows = [" ".join(f"{row.get(time, '.')!s:<2}" for time in range(max(row) + 1)) for row in table]
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize("size", TABLES)
def test_tables(size: tuple[int, int]) -> None:
    assert drawn(timeline(*size)) == TABLES[size]


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_batches", [0, 1, 2, 3, 7, 8, 9, 20])
def test_phases(num_stages: int, num_batches: int) -> None:
    for stage in range(num_stages):
        passes = program(warm_up(stage, num_stages), num_batches)
        initial, steady, final = phases(passes)
        ahead = min(num_stages - stage, num_batches)
        # Forwards only, until the first batch has come back.
        assert initial == ahead
        # Then a backward and a forward in turn, and the backwards that are left.
        kinds = [each.kind for each in passes]
        assert kinds[initial : initial + steady] == [PassKind.BACKWARD, PassKind.FORWARD] * (
            num_batches - ahead
        )
        assert final == ahead
        for kind in PassKind:
            assert [each.batch for each in passes if each.kind is kind] == list(range(1, num_batches + 1))


@given(num_stages=st.integers(1, 12), num_batches=st.integers(0, 30))
def test_every_pass_comes_once_after_what_it_needs(num_stages: int, num_batches: int) -> None:
    table = timeline(num_stages, num_batches)
    times = {(stage, each): time for stage, row in enumerate(table) for time, each in row.items()}
    assert len(times) == 2 * num_stages * num_batches
    for (stage, each), time in times.items():
        if each.kind is PassKind.FORWARD and stage > 0:
            assert times[stage - 1, each] < time
        if each.kind is PassKind.BACKWARD:
            assert times[stage, Pass(PassKind.FORWARD, each.batch)] < time
            if stage < num_stages - 1:
                assert times[stage + 1, each] < time


@given(num_stages=st.integers(2, 8), num_batches=st.integers(20, 30))
def test_no_stage_idles_in_the_middle(num_stages: int, num_batches: int) -> None:
    """The last stage never waits once it has begun; the whole takes as long as that, and the way there and back."""
    table = timeline(num_stages, num_batches)
    assert max(table[0]) + 1 == 2 * (num_batches + num_stages - 1)
    assert set(table[-1]) == set(range(num_stages - 1, num_stages - 1 + 2 * num_batches))


@given(num_stages=st.integers(1, 8), num_batches=st.integers(0, 30))
def test_a_replica_is_free_again_before_its_next_batch(num_stages: int, num_batches: int) -> None:
    """So a batch's two passes read the same replica, at every stage, and no other batch writes it in between."""
    for stage in range(num_stages):
        holder: dict[int, int] = {}
        for each in program(warm_up(stage, num_stages), num_batches):
            replica = replica_of(each.batch, num_stages)
            if each.kind is PassKind.FORWARD:
                assert replica not in holder
                holder[replica] = each.batch
            else:
                assert holder.pop(replica) == each.batch
        assert not holder


def test_replicas_and_pulls_as_in_the_papers_example() -> None:
    """Fig. 2: two nodes, tau = 2: batches 1 and 2 update locally, 3 and 4 synchronise."""
    assert [replica_of(t, 2) + 1 for t in range(1, 7)] == [1, 2, 1, 2, 1, 2]
    assert [pulls(t, 2, 2) for t in range(1, 9)] == [False, False, True, True] * 2
    assert [pulls(t, 3, 1) for t in range(1, 5)] == [True] * 4
