"""What is drawn is kept, drawn for all segments and some rounds at once, and, where it is much, a round ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from hocket_crossover.derangements import Place
from hocket_crossover.rounds import Rounds


class Draw:
    """Takes down what is drawn, and in which thread; what it draws says where it belongs."""

    def __init__(self) -> None:
        self.calls: list[list[Place]] = []
        self.threads: list[str] = []

    def __call__(self, places: Sequence[Place]) -> Sequence[Place]:
        self.calls.append(list(places))
        self.threads.append(threading.current_thread().name)
        return places


def test_small_draws_are_made_for_all_segments_and_some_rounds_at_once() -> None:
    draw = Draw()
    rounds = Rounds(draw, 8)
    for round in range(40):
        for segment in (0, 2, 5, 2):
            assert rounds.of(round, segment) == (round, segment)
    assert draw.calls[:3] == [[(0, 0)], [(0, 2)], [(0, 5)]]
    assert draw.calls[3:] == [
        [(round, segment) for round in range(first, first + 16) for segment in (0, 2, 5)]
        for first in (1, 17, 33)
    ]


def test_ranks_that_are_some_rounds_apart_draw_once() -> None:
    draw = Draw()
    rounds = Rounds(draw, 8)
    for round in range(60):
        for behind in (0, 1, 3):
            assert rounds.of(max(0, round - behind), 0) == (max(0, round - behind), 0)
    drawn = [place for places in draw.calls for place in places]
    assert len(set(drawn)) == len(drawn)


def test_a_segment_that_was_not_foreseen_is_drawn_for_all_rounds_that_are_kept() -> None:
    draw = Draw()
    rounds = Rounds(draw, 8)
    rounds.of(0, 0)
    rounds.of(1, 0)
    for round in range(2, 17):
        assert rounds.of(round, 9) == (round, 9)
    assert draw.calls[2:] == [[(round, 9) for round in range(2, 17)]]


@pytest.mark.parametrize("size", [1000, 100_000])
def test_much_is_drawn_ahead_on_another_thread(size: int) -> None:
    draw = Draw()
    rounds = Rounds(draw, size)
    for round in range(5):
        for segment in range(40):
            assert rounds.of(round, segment) == (round, segment)
    here = threading.current_thread().name
    drawn_here = {
        place[0]: thread == here
        for places, thread in zip(draw.calls, draw.threads, strict=True)
        for place in places
    }
    assert [drawn_here[round] for round in range(5)] == [True, True, False, False, False]
    assert len(draw.calls) <= 40 + 5, "a round is drawn once, and at most one ahead"


@pytest.mark.parametrize("size", [8, 2000])
def test_a_round_that_comes_again_is_the_same(size: int) -> None:
    rounds = Rounds(Draw(), size)
    for round in (0, 1, 2, 3, 4, 5, 6, 0, 1, 50, 3, 2**40):
        for segment in range(30):
            assert rounds.of(round, segment) == (round, segment)
