"""A Python that is forked from one that has imported torch finds what one that is started finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hocket.launch.mpiexec import find_mpiexec
from warm_python import forks_in_place_of_starts, started_afresh

SEES = """
import atexit, faulthandler, json, os, sys
atexit.register(print, "ended")
print(json.dumps({
    "arguments": sys.argv, "folders": sys.path[:2], "name": __name__, "file": globals().get("__file__"),
    "works in": os.getcwd(), "variables": {**os.environ}, "reads": sys.stdin.read(), "parent": os.getppid(),
    "group": os.getpgid(0) - (os.getpgid(0) == os.getpid()) * os.getpid(),
    "session": os.getsid(0) - (os.getsid(0) == os.getpid()) * os.getpid(), "open": os.listdir("/proc/self/fd")[:-1],
    "shown": sorted(filter(None, open("/proc/self/environ").read().split("\\0"))),
    "shows faults": faulthandler.is_enabled(), "loaded": any(name.startswith("tor" "ch") for name in sys.modules),
}))
print("error", file=sys.stderr)
sys.exit(3)
"""
STARTS = """
import subprocess, sys
sees = [sys.executable, "sees.py", "b"]
ended = subprocess.run(sees, input="given", text=True, preexec_fn=lambda: print("before", flush=True))
print(ended.returncode)
raise KeyboardInterrupt
"""


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    (tmp_path / "starts.py").write_text(STARTS)
    monkeypatch.chdir(tmp_path)


def ended(*words: str, **options: Any) -> tuple[dict[str, Any], int, str, str]:
    """Return what a Python has seen, its exit status, and what else it has printed."""
    done = subprocess.run(
        [sys.executable, *words], input="given", text=True, capture_output=True, check=False, **options
    )
    seen, _, rest = done.stdout.partition("\n")
    return json.loads(seen), done.returncode, rest, done.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"cwd": "/"},
        {"start_new_session": True, "env": {"PYTHONPATH": "/usr", "PYTHONFAULTHANDLER": "1", "SET": "1"}},
        {"process_group": 0},
    ],
    ids=", ".join,
)
@pytest.mark.parametrize("program", ["sees.py", "-c"])
def test_it_finds_what_a_started_one_finds(program: str, options: dict[str, Any], tmp_path: Path) -> None:
    # What pytest's `readline` has set besides is no variable of Python's.
    options = {**options, "env": {**os.environ, **options.get("env", {})}}
    words = ["-c", SEES] if program == "-c" else [str(tmp_path / program)]
    with started_afresh():
        seen, *rest = ended(*words, "-a", **options)
    assert not seen["loaded"]
    assert rest == [3, "ended\n", "error\n"]
    with forks_in_place_of_starts():
        given, *others = ended(*words, "-a", **options)
    assert {name: value for name, value in given.items() if value != seen[name]} == {"loaded": True}
    assert others == rest


def test_what_it_starts_is_its_fork() -> None:
    with forks_in_place_of_starts():
        done = subprocess.run(
            [sys.executable, "starts.py"],
            stdin=subprocess.DEVNULL,
            text=True,
            capture_output=True,
            check=False,
        )
    before, seen, *after = done.stdout.splitlines()
    assert (before, after) == ("before", ["ended", "3"])
    assert json.loads(seen)["loaded"]
    assert json.loads(seen)["reads"] == "given"
    assert done.returncode == -signal.SIGINT
    assert done.stderr.startswith("error\nTraceback")
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_a_program_that_names_torch_is_started() -> None:
    with forks_in_place_of_starts():
        program = "import sys; print('torch' in sys.modules)"
        assert subprocess.check_output([sys.executable, "-c", program]) == b"False\n"


def test_a_killed_one_has_been_killed() -> None:
    with forks_in_place_of_starts():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        process.kill()
        assert process.wait() == -signal.SIGKILL


RANK = """
import json, os, signal, sys, time
from mpi4py import MPI
peer = MPI.COMM_WORLD
seen = {"arguments": sys.argv, "works in": os.getcwd(), "sum": peer.allreduce(peer.rank + 1), "set": os.environ["SET"],
        "reads": sys.argv[1] == "waits" or sys.stdin.readline(),
        "leads": os.getpgid(0) == os.getpid(), "loaded": "tor" + "ch" in sys.modules}
if peer.rank == 0:
    print(json.dumps(seen), flush=True)
if sys.argv[1] == "waits":
    signal.signal(signal.SIGUSR1, lambda number, frame: (print("heard", flush=True), os._exit(4)))
    print(os.getpid(), flush=True)
    time.sleep(100)
rank = peer.rank
MPI.Finalize()
if sys.argv[1] == "is killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(3 if sys.argv[1] == "fails" and rank == 1 else 0)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("end", ["ends", "fails", "is killed"])
def test_ranks_of_an_mpiexec_are_forks_and_find_what_started_ones_find(end: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "rank.py").write_text(RANK)
    command = find_mpiexec().command(2, [sys.executable, "rank.py", end], folder=tmp_path / "launcher")

    def run() -> tuple[dict[str, Any], int]:
        done = subprocess.run(
            command,
            env=os.environ | {"SET": "a b"},
            input="given\n",
            text=True,
            capture_output=True,
            check=False,
        )
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen, done.returncode

    with started_afresh():
        seen, status = run()
    with forks_in_place_of_starts():
        given, its_status = run()
    assert (seen.pop("loaded"), given.pop("loaded")) == (False, True)
    assert (given, its_status) == (seen, status)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_what_a_stand_in_gets_its_rank_gets(number: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "rank.py").write_text(RANK)
    command = find_mpiexec().command(1, [sys.executable, "rank.py", "waits"], folder=tmp_path / "launcher")
    with forks_in_place_of_starts():
        job = subprocess.Popen(
            command, env=os.environ | {"SET": ""}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
    assert job.stdout is not None
    job.stdout.readline()
    rank = int(job.stdout.readline())
    words = {
        int(path.parent.name): path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")
    }
    [stand_in] = [
        each
        for each, command in words.items()
        if command[0] == os.fsencode(sys.executable) and command[-3:] == [b"rank.py", b"waits", b""]
    ]
    os.killpg(stand_in, number)
    said, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert said == ("heard\n" if number == signal.SIGUSR1 else "")
    until_s = time.monotonic() + 20
    while Path(f"/proc/{rank}").exists():
        assert time.monotonic() < until_s, "the rank outlives its stand-in"
