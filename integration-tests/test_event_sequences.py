"""Seeded sequences of what befalls jobs of real ranks: each ends soon with a line that says why, and loses nothing.

A sequence draws a transport, two or three ranks, a recipe, how it saves, a script under `hocket launch` or `hocket
run`, and one to three events at drawn moments: signals to one rank, to the launcher, to all at once, deaths, also of a
loader's worker, ranks that leave, raise, stop or sleep, a disk that is full, files that another host's disk shows late.
After each the job is started again. In the end it has come where it would have come undisturbed, bit for bit, which
virtual ranks tell.

HOCKET_EVENT_SEQUENCES says how many, in place of three, or which: FROM:TO. Launchers and ranks are forks of one process
(`tools/warm_python.py`), but for one seed of five and for ranks of an mpiexec, which are new interpreters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from drawn_events import PAUSED, SIGNALLED, Drawn
from event_job import FOLDER_VARIABLE, RECIPES, STEPS, processes_of, trained
from safetensors.torch import load_file

import hocket
from hocket.checkpoint.folder import complete, newest_first
from hocket.checkpoint.manifest import Manifest
from hocket.cli.main import main
from hocket.errors import CheckpointError
from warm_python import forks_in_place_of_starts, started_afresh

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

#: Without the variable: both transports, scripts and a run, ends of the launcher and of a rank, a request, a full disk.
SEEDS = range(*map(int, os.environ.get("HOCKET_EVENT_SEQUENCES", "0").split(":"))) or (16, 19, 61)
HERE = Path(__file__).parent
HOCKET = [sys.executable, "-m", "hocket"]
#: Seconds from an event until a line says why the job ends, and until it has ended.
LINE_S, LONGEST_S = 30.0, 60.0
#: What ranks may take to start, where other jobs have the cores.
START_S = 120.0


@dataclass
class Attempt:
    """The end of a job.

    Attributes:
        status: its launcher's, as `subprocess` gives it.
        lines: its output, with the second of each line.
        happened: the time of each event.
    """

    status: int
    lines: list[tuple[float, str]]
    happened: dict[int, float]

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)


def carried_out(folder: Path, sequence: Drawn, number: int) -> Attempt:
    """Start the job once; return how it ended, after what befalls it."""
    events = sequence.attempts[number] if number < len(sequence.attempts) else []
    (folder / "events.json").write_text(json.dumps(events))
    for old in [*folder.glob("happened-*"), *folder.glob("joined-*"), *folder.glob("*.npy")]:
        old.unlink()
    late = Late(folder, sequence, *sequence.late[number]) if number in sequence.late else None
    process = started(folder, sequence)
    (folder / "launcher").write_text(str(process.pid))
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        status = _wait(process, folder)
    except subprocess.TimeoutExpired:
        _end(folder, signal.SIGABRT)
        reader.join(5.0)
        process.wait()
        raise AssertionError(
            "the job hangs:\n" + "\n".join(f"{when} {line}" for when, line in lines)
        ) from None
    finally:
        if late is not None:
            late.come()
        outlived = _outlive(folder)
        _end(folder, signal.SIGKILL)
    reader.join(5.0)
    if process.stdout is not None and not reader.is_alive():
        process.stdout.close()
    assert not outlived, "ranks outlive their launcher:\n" + "\n".join(line for _, line in lines)
    return Attempt(status, lines, happened(folder))


def started(folder: Path, sequence: Drawn) -> subprocess.Popen[str]:
    """Start the launcher of a job in a session of its own."""
    variables = {
        **os.environ,
        FOLDER_VARIABLE: str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TMPDIR": os.readlink(folder / "temporary"),
        "PYTHONFAULTHANDLER": "1",
    }
    with forks_in_place_of_starts() if sequence.forks else started_afresh():
        return subprocess.Popen(
            command(folder, sequence),
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def command(folder: Path, sequence: Drawn) -> list[str]:
    """Return what starts the job, or goes on with it."""
    where = ["-n", str(sequence.ranks), "--transport", sequence.transport]
    if sequence.program == "script":
        return [*HOCKET, "launch", *where, str(HERE / "event_job.py"), str(folder)]
    if complete(checkpoints_of(folder, sequence)):
        return [*HOCKET, "resume", str(folder / "out"), "--transport", sequence.transport]
    return [*HOCKET, *run_arguments(folder / "out", sequence.job), *where]


def run_arguments(out: Path, job: dict[str, Any]) -> list[str]:
    return [
        "run",
        job["recipe"],
        *RECIPES[job["recipe"]],
        "task=event_job:Befallen",
        f"steps={STEPS}",
        "log_every=1",
        f"checkpoint.every={job['save_every']}",
        "--out",
        str(out),
    ]


def _wait(process: subprocess.Popen[str], folder: Path) -> int:
    """Return a job's status; it ends soon after the last event, or after a start that a busy machine makes long."""
    began_s = time.time()
    while True:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            last_s = max(happened(folder).values(), default=began_s + START_S)
            if time.time() > last_s + LONGEST_S:
                raise


def happened(folder: Path) -> dict[int, float]:
    """Return when each event of an attempt has happened."""
    return {int(path.name.split("-")[1]): float(os.readlink(path)) for path in folder.glob("happened-?")}


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.time(), line.rstrip("\n")))


def _end(folder: Path, number: signal.Signals) -> None:
    for process in processes_of(folder):
        os.kill(process, number)


def _outlive(folder: Path) -> bool:
    """Return whether processes of a job live on, some seconds after its launcher has ended."""
    end_s = time.monotonic() + LINE_S
    while processes_of(folder):
        if time.monotonic() > end_s:
            return True
        time.sleep(0.05)
    return False


class Late:
    """A file of the newest checkpoint that is not seen until some seconds after the ranks have begun.

    Args:
        folder: of the job.
        seconds: after that.
        is_manifest: whether it is the manifest; else the last rank's file.
    """

    def __init__(self, folder: Path, sequence: Drawn, seconds: float, is_manifest: bool) -> None:
        self._folder, self._ranks, self._seconds = folder, sequence.ranks, seconds
        self._file: Path | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        try:
            newest, *_ = newest_first(checkpoints_of(folder, sequence))
        except CheckpointError:
            return
        name = "manifest.json" if is_manifest else f"rank-{sequence.ranks - 1:04d}.safetensors"
        self._file, self._away = newest / name, folder / "away"
        self._file.rename(self._away)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while len(list(self._folder.glob("joined-*"))) < self._ranks and not self._ended.wait(0.05):
            pass
        self._ended.wait(self._seconds)
        self.come()

    def come(self) -> None:
        """Show the file, now."""
        self._ended.set()
        with self._lock:
            if self._file is not None and self._away.exists():
                assert self._file.parent.exists(), f"{self._file.parent} was removed while a file was late"
                self._away.rename(self._file)


def checkpoints_of(folder: Path, sequence: Drawn) -> Path:
    return folder / "checkpoints" if sequence.program == "script" else folder / "out" / "checkpoints"


def saved(folder: Path, sequence: Drawn) -> int:
    """Return the step of the newest checkpoint, 0 for none; raises where it cannot be read."""
    try:
        return Manifest.read(newest_first(checkpoints_of(folder, sequence))[0]).step
    except CheckpointError:
        if complete(checkpoints_of(folder, sequence)):
            raise
        return 0


def told(folder: Path) -> int:
    return max((int(path.name.split("-")[2].split(".")[0]) for path in folder.glob("told-step-*")), default=0)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{seed}-{Drawn(seed).transport}")
def test_what_befalls_a_job(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Drawn(seed)
    print(f"seed {seed}: {sequence}")
    temporary = TemporaryDirectory()  # of a short name: loaders' workers make sockets in it
    (tmp_path / "temporary").symlink_to(temporary.name)
    (tmp_path / "job.json").write_text(json.dumps(sequence.job))
    before = 0
    for number in range(len(sequence.attempts)):
        attempt = carried_out(tmp_path, sequence, number)
        print(f"attempt {number}: status {attempt.status}, {attempt.happened}\n{attempt.output}\n")
        check_end(tmp_path, sequence, number, attempt)
        newest = saved(tmp_path, sequence)
        assert newest >= max(before, told(tmp_path)), f"the checkpoint of step {before} is lost"
        check_request(sequence, number, attempt, before, newest)
        before = newest
    check_numbers(tmp_path, sequence, monkeypatch)
    temporary.cleanup()


def check_end(folder: Path, sequence: Drawn, number: int, attempt: Attempt) -> None:
    """Check that a job has ended with its work done, or with a status and a line that say why, and soon."""
    if attempt.status == 0:
        assert is_done(folder, sequence), "status 0, and the run is not complete"
        return
    causes = happened_to(sequence, number, attempt)
    assert causes or number in sequence.late, "ended without a cause"
    if any((each["what"], each["to"]) == ("SIGKILL", "launcher") for each in causes):
        return  # nobody is left to say so
    said = [when for when, line in attempt.lines if "hocket: " in line]
    assert said, "ended without a line"
    first = min((attempt.happened[each["number"]] for each in causes), default=said[0])
    assert said[0] - first < LINE_S, f"{said[0] - first:.0f} s without a line"


def happened_to(sequence: Drawn, number: int, attempt: Attempt) -> list[dict[str, Any]]:
    """Return the events of an attempt after which it may end."""
    events = sequence.attempts[number] if number < len(sequence.attempts) else []
    return [e for e in events if e["number"] in attempt.happened and (e["what"], e["to"]) not in PAUSED]


def is_done(folder: Path, sequence: Drawn) -> bool:
    if sequence.program == "run":
        summary = folder / "out" / "summary.json"
        return summary.exists() and json.loads(summary.read_text())["steps"] == STEPS
    return all((folder / f"{rank}.npy").exists() for rank in range(sequence.ranks))


def check_request(sequence: Drawn, number: int, attempt: Attempt, before: int, newest: int) -> None:
    """Check that ranks which were asked to end in training have saved what they had done."""
    happened = happened_to(sequence, number, attempt)
    if [(e["what"], e["to"]) in SIGNALLED and e["before"] is None for e in happened] != [True]:
        return
    if not sequence.job["on_signal"] or attempt.status == 0 or number in sequence.late:
        return
    assert attempt.status == 143, attempt.status
    assert newest >= min(before + happened[0]["step"], STEPS), (
        f"asked to end, and step {newest} is the newest"
    )


def check_numbers(folder: Path, sequence: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on once more, which nothing befalls, and compare with what was never disturbed."""
    number = len(sequence.attempts)
    if sequence.last_is_real:
        attempt = carried_out(folder, sequence, number)
        print(f"last: status {attempt.status}\n{attempt.output}")
        if attempt.status != 0 and number in sequence.late:
            check_end(folder, sequence, number, attempt)
            attempt = carried_out(folder, sequence, number + 1)
        assert attempt.status == 0, attempt.output
    if sequence.program == "script":
        compare_parameters(folder, sequence)
    else:
        compare_runs(folder, sequence, monkeypatch)


def compare_parameters(folder: Path, sequence: Drawn) -> None:
    ranks = sequence.ranks
    if sequence.last_is_real:
        found = [np.load(folder / f"{rank}.npy") for rank in range(ranks)]
    else:
        found = hocket.virtual(ranks).run(trained, sequence.job, folder / "checkpoints", None)
    for rank, (ended, expected) in enumerate(
        zip(found, undisturbed(sequence.job["recipe"], ranks), strict=True)
    ):
        assert np.array_equal(ended, expected), f"rank {rank} has ended elsewhere"


@cache
def undisturbed(recipe: str, ranks: int) -> list[Any]:
    return hocket.virtual(ranks).run(trained, {"recipe": recipe}, None, None)


def compare_runs(folder: Path, sequence: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    if not sequence.last_is_real:
        if complete(checkpoints_of(folder, sequence)):
            hocket_("resume", str(folder / "out"), "--transport", "virtual")
        else:
            hocket_(*run_arguments(folder / "out", sequence.job), *virtual(sequence.ranks))
    found, expected = run_of(folder / "out"), undisturbed_run(sequence.job["recipe"], sequence.ranks)
    assert all(torch.equal(value, expected[0][name]) for name, value in found[0].items())
    assert found[1] == expected[1]


@cache
def undisturbed_run(recipe: str, ranks: int) -> tuple[dict[str, torch.Tensor], int]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "whole"
        hocket_(*run_arguments(out, {"recipe": recipe, "save_every": 4}), *virtual(ranks))
        return run_of(out)


def run_of(out: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return a run's parameters, and its number of rows."""
    rows = (out / "metrics.jsonl").read_text().splitlines()
    return load_file(out / "model.safetensors"), len(rows)


def virtual(ranks: int) -> list[str]:
    return ["-n", str(ranks), "--transport", "virtual"]


def hocket_(*arguments: str) -> None:
    with patch.object(sys, "argv", ["hocket", *arguments]), pytest.raises(SystemExit, match="0"):
        main()
