"""The account of partial collectives: what ranks contribute is applied or waits for a later round, and counts once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from hocket.testing.account import LOOPS, MOVES, STEPPED_BY, Move, check_account

FULL = {"name": "eager.partial_allreduce", "candidates": None, "starts": "last"}
#: Ranks are handed all rounds, so that they apply the same.
SOLO = {"name": "eager.partial_allreduce", "candidates": None, "missed": "sum"}


def exchange(collective: dict[str, Any], overlap: str = "none") -> list[dict[str, Any]]:
    return [{"collective": collective, "segments": "layers", "overlap": overlap}]


# What ranks drop of a sum may hold other ranks' late parts: moves here drop nothing.
_DROPPING = ("drop", "zero", "freeze", "thaw")
KEEPING = MOVES.map(lambda moves: [move for move in moves if move[0] not in _DROPPING])

EXCHANGES = {
    "full": exchange(FULL),
    "solo": exchange(SOLO),
    "solo within backward": exchange(SOLO, "backward"),
    "solo by messages": exchange({**SOLO, "shared": False}),
    "majority": exchange({**SOLO, "candidates": 1}),
    "bounded": exchange({**SOLO, "staleness": 1}),
}


@pytest.mark.parametrize("name", EXCHANGES)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@example(LOOPS["twice"], "nesterov")
@example(LOOPS["frozen"], "adam")
@example(LOOPS["added"], "several")
@example(LOOPS["added to a sum"], "plain")
@given(moves=KEEPING, optimizer=st.sampled_from(sorted(STEPPED_BY)))
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    check_account({"gradients": EXCHANGES[name]}, moves, STEPPED_BY[optimizer], size=3, pace_s=0.01)
