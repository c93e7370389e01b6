"""Every exchange that the slots allow: collectives, topologies, compressors, overlaps and scopes.

One training of each cell shows that its numbers are the reference's, that `plan` predicts what sessions count, and that
what they count is what the transport carries. Virtual ranks carry out the transport's own collectives without
messages, so the last is seen where exchanges are made of messages: gossip, and the allreduces that are schedules.
"""

from __future__ import annotations

import pytest
from checks import STEPS, check_bytes, check_numbers, steps_for
from matrix import Cell, accepted, tried
from trial import train_virtually

SLOTS = ("gradients", "parameters")


@pytest.mark.parametrize(
    ("cell", "ranks"),
    [pytest.param(cell, ranks, id=f"{cell.id}-{ranks}") for slot in SLOTS for cell, ranks in tried(slot)],
)
def test_cell(cell: Cell, ranks: int) -> None:
    strategy = cell.compose()
    run = train_virtually(strategy, ranks, steps_for(strategy))
    check_numbers(strategy, run)
    check_bytes(strategy, ranks, run, rounds=STEPS, is_carried="world" in cell.choices)


@pytest.mark.parametrize("slot", SLOTS)
def test_each_cell_is_tried_and_each_choice_meets_each_number_of_ranks(slot: str) -> None:
    able, chosen = accepted(slot), tried(slot)
    assert {cell.id for cell, _ in chosen} == {cell.id for cell, _ in able}
    every = {(choice, ranks) for cell, ranks in able for choice in cell.choices}
    assert {(choice, ranks) for cell, ranks in chosen for choice in cell.choices} == every
