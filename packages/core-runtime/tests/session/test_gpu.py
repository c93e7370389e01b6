"""Sessions of two ranks that share a GPU: the CPU's numbers, without a step that waits for the device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hocket.launch.launching import launch
from hocket.launch.own_ranks import OwnRanks

RANK = Path(__file__).parent / "gpu_rank.py"
STRATEGIES = ("sgd", "agd", "dpsgd", "overlap_sgp", "periodic_average,parameters.0.every=2")


@pytest.mark.gpu
def test_sessions_on_a_gpu_have_the_cpu_s_numbers_and_wait_for_events_alone(tmp_path: Path) -> None:
    program = [sys.executable, str(RANK), "cuda", str(tmp_path), *STRATEGIES]
    assert launch(OwnRanks(), 2, program, folder=tmp_path) == 0
    for rank in range(2):
        for strategy, (found, expected) in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), strategy
