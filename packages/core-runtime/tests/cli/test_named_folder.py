"""The folder of a run for which nobody names one: one for all ranks, and no other run's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.cli.folders import named_folder
from hocket.errors import UserError
from hocket.training.run import RunConfig, load_run

LONGEST_S = 150.0
# Rank 1 has started in another second, as ranks of other hosts do.
RANK = """
import os, time
if os.environ["RANK"] == "1":
    time.strftime = lambda *given: "20010203-040506"
from hocket.cli.main import main
main()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20010203-040506")
    return load_run("sgd", ())


def test_runs_that_begin_in_one_second_have_folders_of_their_own(run: RunConfig) -> None:
    with named_folder(None, run, make=True) as first, named_folder(None, run, make=True) as second:
        assert (first, second) == (Path("runs/sgd-20010203-040506"), Path("runs/sgd-20010203-040506-2"))
        (second / "config.yaml").touch()
    assert not first.exists(), "nothing came of it"
    assert second.exists()


def test_looking_makes_nothing(run: RunConfig, tmp_path: Path) -> None:
    with named_folder(None, run, make=False) as folder:
        assert folder == Path("runs/sgd-20010203-040506")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_said(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("somebody's")
    with (
        pytest.raises(UserError, match=r"cannot be made .*: name another folder with --out"),
        named_folder(None, run, make=True),
    ):
        pass


@pytest.mark.timeout(200)
def test_ranks_that_a_launcher_has_started_use_the_folder_that_rank_0_names(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", RANK, "run", "sgd", "steps=2", "epochs=1", "checkpoint.every=1"]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **meeting, "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=LONGEST_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name != "sgd-20010203-040506"
    assert (folder / "summary.json").exists()
    assert len(list(folder.glob("checkpoints/*"))) >= 1
