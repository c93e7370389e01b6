"""A machine that looks for sequences of moves after which a session's numbers are wrong.

Hypothesis draws what users do, move by move (`machine/moves.py`): attach and close, steps in many ways, uneven loaders,
NaN on some rank, frozen and rebound parameters, checkpoints and other numbers of ranks, changes of phase, errors. Each
sequence is performed on 1 to 4 virtual ranks, and on replicas in one plain loop (`machine/replicas.py`). After it
every number is right to rounding, or an error named the move. What failed is printed as a script, made as short as
possible.

HOCKET_SEQUENCES says how many; HOCKET_SEED takes others.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine.drawing import SessionMachine

NUM_SEQUENCES = int(os.environ.get("HOCKET_SEQUENCES", "20"))
SEED = int(os.environ.get("HOCKET_SEED", "0"))
PER_TEST = 50


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*is of .* ranks")
@pytest.mark.parametrize("part", range(-(-NUM_SEQUENCES // PER_TEST)))
def test_sequences_of_moves(part: int) -> None:
    @seed(SEED + part)
    class Machine(SessionMachine):
        pass

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=min(PER_TEST, NUM_SEQUENCES),
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
