"""Drawn partners are kept, and a round is drawn for all segments at once."""

from __future__ import annotations

from collections.abc import Sequence

from hocket_crossover.derangements import DrawKey
from hocket_crossover.rounds import Rounds


class Draw:
    """Takes down what is drawn; what it draws says where it belongs."""

    def __init__(self) -> None:
        self.calls: list[list[DrawKey]] = []

    def __call__(self, draw_keys: Sequence[DrawKey]) -> Sequence[DrawKey]:
        self.calls.append(list(draw_keys))
        return draw_keys


def test_a_round_is_drawn_for_all_segments_at_once() -> None:
    draw = Draw()
    rounds = Rounds(draw)
    for round in range(4):
        for segment in (0, 2, 5, 2):
            assert rounds.of(round, segment) == (round, segment)
    assert draw.calls[:3] == [[(0, 0)], [(0, 2)], [(0, 5)]]
    assert draw.calls[3:] == [[(round, segment) for segment in (0, 2, 5)] for round in (1, 2, 3)]


def test_ranks_that_are_some_rounds_apart_draw_once() -> None:
    draw = Draw()
    rounds = Rounds(draw)
    for round in range(60):
        for behind in (0, 1, 3):
            assert rounds.of(max(0, round - behind), 0) == (max(0, round - behind), 0)
    drawn = [key for draw_keys in draw.calls for key in draw_keys]
    assert len(set(drawn)) == len(drawn)


def test_a_segment_that_was_not_foreseen_is_drawn_by_itself() -> None:
    draw = Draw()
    rounds = Rounds(draw)
    rounds.of(0, 0)
    assert rounds.of(1, 0) == (1, 0)
    assert rounds.of(1, 9) == (1, 9)
    assert draw.calls == [[(0, 0)], [(1, 0)], [(1, 9)]]


def test_a_round_that_comes_again_is_the_same() -> None:
    rounds = Rounds(Draw())
    for round in (0, 1, 2, 3, 4, 5, 6, 0, 1, 50, 3, 2**40):
        for segment in range(30):
            assert rounds.of(round, segment) == (round, segment)
