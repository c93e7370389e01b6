"""Every two choices that the slots of exchanges allow: collectives, topologies, compressors, overlaps and scopes.

One training of each cell shows that its numbers are the reference's, that `plan` predicts what sessions count, and that
what they count is what the transport carries. Virtual ranks carry out the transport's own collectives without
messages, so the last is seen where exchanges are made of messages: gossip, and the allreduces that are schedules.

HOCKET_CELLS=all tries every cell: some 1,100 in ten minutes on two cores.
"""

from __future__ import annotations

import pytest
from checks import STEPS, check_bytes, check_numbers, steps_for
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import Cell, accepted, tried
from trial import train_virtually

SLOTS = ("gradients", "parameters")


@pytest.mark.parametrize(
    ("cell", "ranks"),
    [pytest.param(cell, ranks, id=f"{cell.id}-{ranks}") for slot in SLOTS for cell, ranks in tried(slot)],
)
def test_cell(cell: Cell, ranks: int) -> None:
    check(cell, ranks)


@pytest.mark.parametrize("slot", SLOTS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_cell(slot: str, data: st.DataObject) -> None:
    """Combinations of more than two choices: different ones in each run, so that all are seen in the end."""
    check(*data.draw(st.sampled_from(accepted(slot))))


def check(cell: Cell, ranks: int) -> None:
    strategy = cell.compose()
    run = train_virtually(strategy, ranks, steps_for(strategy))
    check_numbers(strategy, run)
    check_bytes(strategy, ranks, run, rounds=STEPS, is_carried="world" in cell.choices)


@pytest.mark.parametrize("slot", SLOTS)
def test_each_choice_is_tried_and_each_collective_meets_each_component(slot: str) -> None:
    able, chosen = accepted(slot), tried(slot)
    assert {choice for each in SLOTS for cell, _ in tried(each) for choice in cell.choices} >= {
        choice for cell, _ in able for choice in cell.choices
    }
    assert {pair for way in chosen for pair in pairs(*way)} == {pair for way in able for pair in pairs(*way)}


def pairs(cell: Cell, ranks: int) -> set[tuple[str, str]]:
    """Return a cell's collective with each component, also such as others hold, and with each switch of these."""
    collective, *others = [*cell.choices, str(ranks)]
    return {(collective.partition("+")[0], word) for choice in others for word in choice.split("+")}
