"""Reports of a rank that waits too long: whom it waits for stands first, who waits with it is not blamed."""

from __future__ import annotations

import time

from hocket.transport.status import RankState, RankStatus, WaitSite, describe_stall, number_ranks, summarise

LANE = "gradients.0[0]"
OUTCOME = "no end after 5 s"


def row(rank: int, state: RankState, lane: str = "", what: str = "", ago_s: float = 8.2) -> RankStatus:
    return RankStatus(rank, time.monotonic() - ago_s, 17, state, lane, what)


def allreduce(*ranks: int) -> WaitSite:
    return WaitSite(LANE, "allreduce", ranks, together=True)


def test_the_culprit_stands_first_and_who_waits_too_last() -> None:
    waiting = [row(rank, RankState.WAITING, LANE, "allreduce") for rank in (1, 3)]
    text = describe_stall(0, allreduce(1, 2, 3), [*waiting, row(2, RankState.COMPUTING)], OUTCOME)
    assert text == (
        f"rank 0 waits for rank 2 in {LANE} (allreduce): no end after 5 s; rank 2 has not arrived: computing, in "
        "no exchange, for 8 s, step 17; ranks 1, 3 wait there too"
    )


def test_a_rank_that_gave_up_there_too_is_not_blamed() -> None:
    rows = [row(1, RankState.GAVE_UP, LANE, "allreduce", 0), row(2, RankState.COMPUTING)]
    text = describe_stall(0, allreduce(1, 2), rows, OUTCOME)
    assert text.startswith(f"rank 0 waits for rank 2 in {LANE}")
    assert text.endswith("rank 1 waits there too")


def test_a_rank_in_another_exchange_is_the_culprit() -> None:
    text = describe_stall(0, allreduce(1), [row(1, RankState.WAITING, "session", "barrier")], OUTCOME)
    assert "waits for rank 1" in text
    assert "rank 1 has not arrived: waiting in session (barrier) for 8 s, step 17" in text


def test_other_states_are_told_apart() -> None:
    rows = [
        row(1, RankState.LEAVING),
        row(2, RankState.FAILED),
        row(3, RankState.GAVE_UP, "session", "barrier"),
    ]
    text = describe_stall(0, allreduce(1, 2, 3), rows, OUTCOME)
    assert "rank 1 has not arrived: at the end of its script for 8 s" in text
    assert "rank 2 has not arrived: failing" in text
    assert "rank 3 has not arrived: giving up on session (barrier)" in text
    assert "waits for ranks 1, 2, 3 in" in text


def test_a_receive_names_its_source_and_who_may_hold_that_up() -> None:
    place = WaitSite("parameters.0[1]", "receive from rank 1, round 4", [1], together=False)
    rows = [
        row(1, RankState.WAITING, "parameters.0[1]", "receive from rank 2, round 4"),
        row(2, RankState.COMPUTING),
        row(3, RankState.WAITING, "session", "barrier"),
    ]
    assert describe_stall(0, place, rows, OUTCOME) == (
        "rank 0 waits for rank 1 in parameters.0[1] (receive from rank 1, round 4): no end after 5 s; rank 1 is "
        "waiting in parameters.0[1] (receive from rank 2, round 4) for 8 s, step 17; rank 2 is computing, in no "
        "exchange, for 8 s, step 17"
    )


def test_ranks_of_other_hosts_are_named_without_a_guess() -> None:
    text = describe_stall(0, allreduce(1, 8, 9), [row(1, RankState.WAITING, LANE, "allreduce")], OUTCOME)
    assert "waits for ranks 8, 9" in text
    assert "ranks 8, 9 are on another host, whose state is not known here" in text


def test_when_all_wait_nobody_is_blamed() -> None:
    rows = [row(rank, RankState.WAITING, LANE, "allreduce") for rank in (1, 2)]
    text = describe_stall(0, allreduce(1, 2), rows, OUTCOME)
    assert text == f"rank 0 waits for ranks 1, 2 in {LANE} (allreduce): {OUTCOME}; ranks 1, 2 wait there too"


def test_many_ranks_are_counted() -> None:
    assert number_ranks([4]) == "rank 4"
    assert number_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    rows = [row(rank, RankState.COMPUTING) for rank in range(1, 100)]
    assert len(describe_stall(0, allreduce(*range(1, 100)), rows, OUTCOME)) < 900


def test_a_summary_puts_together_who_waits_for_the_same() -> None:
    rows = [row(rank, RankState.WAITING, LANE, "allreduce") for rank in (1, 3)]
    rows += [
        row(2, RankState.COMPUTING),
        row(4, RankState.COMPUTING),
        row(5, RankState.WAITING, "session", "barrier"),
    ]
    assert summarise(rows).split("; ") == [
        f"ranks 1, 3 wait in {LANE} (allreduce) for 8 s",
        "rank 2 is computing, in no exchange, for 8 s, step 17",
        "rank 4 is computing, in no exchange, for 8 s, step 17",
        "rank 5 waits in session (barrier) for 8 s",
    ]
    assert summarise([]) == ""
