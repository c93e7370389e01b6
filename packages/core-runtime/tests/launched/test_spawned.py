"""Ranks that torch.multiprocessing starts: what ends the first of them is what its parent prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import HERE, ended


@pytest.mark.parametrize("where", ["within", "after"])
def test_the_exception_of_one_rank_is_printed(where: str, tmp_path: Path) -> None:
    job = ended([sys.executable, str(HERE / "spawned.py"), "2", where], tmp_path)
    assert job.returncode == 1
    # By the rank itself, with the number of its step, and by the parent, which would end it first otherwise.
    assert "UnreadableError: Error(s) in reading:\n\tno record 17\n" in job.stderr
    assert "hocket: rank 1 at step" in job.stderr
    assert "ProcessRaisedException" in job.stderr
    assert "-- Process 1 terminated with the following error:" in job.stderr
