"""A task that ends its process: `hocket run` says in a line that the run is not complete, and the status is not 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.cli.main import main

TASK = """
import sys
from collections import Counter
from dataclasses import dataclass

import torch

from hocket.task import Digits
from hocket.launch.joining import join

steps = Counter()


@dataclass(frozen=True)
class Leaving(Digits):
    at: str = "never"
    rank: int = -1  # all

    def leave(self, now):
        if now == self.at and self.rank in (-1, join().rank):
            sys.exit()

    def data(self, seed):
        self.leave("attach" if join().size > 1 else "check")
        return super().data(seed)

    def loss(self, output, target):
        steps[join().rank] += torch.is_grad_enabled()
        self.leave(f"step {steps[join().rank]}")
        return super().loss(output, target)
"""
LEFT = "task leaving:Leaving: it ends the process, with sys.exit() ("
INCOMPLETE = "before the run is complete: raise an error that says why\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    (tmp_path / "leaving.py").write_text(TASK)


def words(at: str, rank: int, *more: str) -> list[str]:
    task = f"task={{name: 'leaving:Leaving', at: {at}, rank: {rank}}}"
    return ["hocket", "run", "sgd", task, "steps=6", "--out", "out", "--quiet", *more]


def said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *command: str
) -> tuple[object, str]:
    """Run `hocket` in this process; return its status, and what it says."""
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("at", "ranks", "who"),
    [
        ("check", 1, ""),
        ("check", 2, ""),
        ("step 3", 1, ""),
        ("attach", 2, " on rank 1"),
        ("step 3", 2, " on rank 1"),
    ],
)
def test_of_one_rank_and_of_virtual_ones(
    at: str, ranks: int, who: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = 1 if who else -1
    status, line = said(monkeypatch, capfd, *words(at, rank, "-n", str(ranks), "--transport", "virtual"))
    assert status == 2
    assert line.startswith(f"hocket: {LEFT}"), line
    assert line.endswith(f"leaving.py, line 21){who} {INCOMPLETE}"), line
    assert line.count("\n") == 1
    assert not Path("out", "summary.json").exists()


@pytest.mark.parametrize(("at", "rank", "step"), [("attach", 0, 0), ("step 3", -1, 2)])
def test_of_ranks_that_are_processes(at: str, rank: int, step: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *words(at, rank, "-n", "2", "--transport", "torch")],
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    [line] = ended.stderr.splitlines()
    who = "all ranks" if rank == -1 else f"rank {rank}"
    assert (ended.returncode, line.partition(": ")[0]) == (2, "hocket")
    assert line.startswith(
        (f"hocket: {who} at step {step}: {LEFT}", f"hocket: rank 0 at step {step}: {LEFT}")
    ), line
    assert line.endswith(INCOMPLETE.strip()), line


@pytest.mark.parametrize("earlier", [False, True])
def test_ranks_that_leave_past_python(
    earlier: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if earlier:
        assert said(monkeypatch, capfd, *words("never", -1, "--transport", "virtual")) == (0, "")
    monkeypatch.setattr("hocket.cli.running.launch_here", lambda *given: given[-1]() or 0)
    command = words("never", -1, "-n", "2", "--transport", "torch", *(["--overwrite"] if earlier else []))
    status, line = said(monkeypatch, capfd, *command)
    assert status == 2
    assert line.startswith(
        "hocket: all ranks exited with status 0 before the run in out was complete, so some code called os._exit(0)"
    )
    assert Path("out", "summary.json").exists() == earlier
