"""Delays and reordering keep the contract on real MPI, too, where nothing but the ranks' own looks lets them pass.

Killed ranks of real jobs: `tests/endings`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from in_jobs import ConformanceInJobs

from hocket.testing.faulty import carry_out_with_faults

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.full,  # `test_faults.py` has them on virtual ranks
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

FAULTS = {"seed": 5, "delay_s": [0.0, 0.003], "reorder": 0.5}


class TestMPI(ConformanceInJobs):
    sizes = (2, 3)

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(size, carry_out_with_faults, FAULTS, body.__module__, body.__name__, *args)
