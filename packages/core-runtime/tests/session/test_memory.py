"""The memory that real ranks take is what a plan says, within a tenth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_cases
import pytest

from hocket.testing.job import Job

FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.01}}
#: Gossip is the last one, as its memory is shared and goes back later.
EXCHANGES: dict[str, dict[str, Any]] = {
    "gradients": {"gradients": [{"collective": "allreduce", "overlap": "backward"}]},
    "residuals": {
        "gradients": [{"collective": "sparse_allreduce", "compressor": FEEDBACK, "segments": "layers"}]
    },
    "outer parameters": {
        "parameters": [
            {
                "collective": "allreduce",
                "segments": "layers",
                "every": 2,
                "outer": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
            }
        ]
    },
    "gossip": {"parameters": [{"collective": "gossip", "topology": "ring", "segments": "layers"}]},
}


@pytest.mark.alone  # each process that ends leaves its part of torch's pages to the others
@pytest.mark.usefixtures("afresh")  # the allocator reads its settings once
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell")
def test_memory_is_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is freed goes back to the system at once.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 18))
    job = Job(2, Path(__file__).parent, "torch")
    try:
        for name, exchanges in EXCHANGES.items():
            for added, planned in job.run(memory_cases.added_and_planned, (exchanges,)):
                assert added == pytest.approx(planned, rel=0.1), name
    finally:
        job.close()
