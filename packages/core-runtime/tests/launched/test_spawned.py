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


@pytest.mark.parametrize("init", ["env", "tcp"])
def test_ranks_of_a_process_group_alone_train_together(init: str, tmp_path: Path) -> None:
    """`RANK` and `WORLD_SIZE` are in no environment; each rank would train alone."""
    job = ended([sys.executable, str(HERE / "grouped.py"), str(tmp_path), init], tmp_path)
    assert job.returncode == 0, job.stderr
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert first.startswith("2 ")


def test_a_process_group_without_a_place_to_meet_is_refused(tmp_path: Path) -> None:
    job = ended([sys.executable, str(HERE / "grouped.py"), str(tmp_path), "file"], tmp_path)
    assert job.stdout.count("a process group of 2 ranks, but neither its store nor the environment") == 2
