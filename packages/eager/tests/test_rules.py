"""Draws and expectations: how many ranks have come when a round starts."""

from __future__ import annotations

import numpy as np
import pytest

from hocket_eager import PartialAllreduce, Quorum, QuorumRules
from hocket_eager.initiative import num_notices


@pytest.mark.parametrize("starts", list(Quorum))
@pytest.mark.parametrize("candidates", [1, 2, 5, 32])
def test_expected_number_of_active_ranks(candidates: int, starts: Quorum) -> None:
    """(P + 1) / (m + 1) for the first of m candidates, m times as many for the last, over many rounds' orders."""
    rules = QuorumRules(32, candidates, starts)
    active = []
    for round in range(2000):
        places = sorted(rules.of_round(round))  # in the order of arrival
        active.append(1 + places[0 if starts is Quorum.FIRST else -1])
    deviation = np.std(active) / len(active) ** 0.5
    expected = 33 / (candidates + 1) * (1 if starts is Quorum.FIRST else candidates)
    assert abs(np.mean(active) - expected) <= 4 * deviation


def test_draws_are_of_rounds_and_seeds() -> None:
    rules = QuorumRules(16, 3, Quorum.FIRST, seed=1)
    drawn = [rules.of_round(round) for round in range(50)]
    assert all(len(candidates) == 3 and candidates <= set(range(16)) for candidates in drawn)
    assert len(set(drawn)) > 25
    assert drawn == [QuorumRules(16, 3, Quorum.LAST, seed=1).of_round(round) for round in range(50)]
    assert drawn != [QuorumRules(16, 3, Quorum.FIRST, seed=2).of_round(round) for round in range(50)]


def test_may_start_and_who_is_missing() -> None:
    arrived = np.array([3, 5, 4, 1])
    first, last = (QuorumRules(4, 4, starts) for starts in Quorum)
    assert first.may_start(4, arrived)
    assert not last.may_start(4, arrived)
    assert last.missing(4, arrived) == "rank 0 and 2 and 3"
    assert first.missing(5, arrived) == "rank 0 or 1 or 2 or 3"
    bounded = QuorumRules(4, 4, Quorum.FIRST, staleness=2)
    assert not bounded.may_start(4, arrived)
    assert bounded.missing(4, arrived) == "rank 3 to round 2"
    assert not QuorumRules(4, 4, Quorum.FIRST, staleness=3).may_start(4, arrived)
    assert QuorumRules(4, 4, Quorum.FIRST, staleness=4).may_start(4, arrived)


def test_candidates_are_at_most_all_ranks() -> None:
    assert PartialAllreduce(candidates=5).rules(3).candidates == 3
    assert PartialAllreduce(candidates=None).rules(3).candidates == 3


def test_notices_of_a_round() -> None:
    assert num_notices(QuorumRules(8, 8, Quorum.FIRST)) == 7
    assert num_notices(QuorumRules(5, 1, Quorum.LAST)) == 7
    assert num_notices(QuorumRules(8, 8, Quorum.LAST)) == 7 + 7
    assert num_notices(QuorumRules(8, 1, Quorum.FIRST, staleness=3)) == 7 + 7 / 8 + 7
