"""The same over MPI: real threads, real messages, bells between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from bodies import ALLREDUCES, Told, check_solo

from hocket.transport.launching import find_mpiexec

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

_RANK = Path(__file__).with_name("mpi_rank.py")
_SIZES = (2, 3, 5)


def _run(size: int, body: str, *args: object, expected: int = 0) -> str:
    """Run a function of `bodies` on `size` ranks and return what they printed."""
    command = find_mpiexec().command(size, [sys.executable, str(_RANK), body, json.dumps(args)])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode != 0) == bool(expected), done.stdout + done.stderr
    return done.stdout + done.stderr


def _told(output: str, size: int) -> list[object]:
    by_rank = [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]
    assert len(by_rank) == size
    return [entry["told"] for entry in sorted(by_rank, key=lambda entry: entry["rank"])]


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("allreduce", ALLREDUCES)
def test_solo(size: int, allreduce: str) -> None:
    rounds = 60
    told = _told(_run(size, "solo_rounds", 1, rounds, 5, allreduce, 10.0), size)
    check_solo([Told(**rank) for rank in told], rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", _SIZES)
def test_solo_with_messages_that_do_not_fit_a_ring(size: int) -> None:
    rounds = 20
    told = _told(_run(size, "solo_rounds", 2, rounds, 1000, "recursive doubling", 10.0), size)
    check_solo([Told(**rank) for rank in told], rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("engine", ["thread", "inline"])
@pytest.mark.parametrize("count", [0, 1, 7, 5003])
def test_allreduce(size: int, engine: str, count: int) -> None:
    told = _told(_run(size, "allreduce_rounds", 3, engine, "ring", count, "float32"), size)
    assert told == [told[0]] * size


@pytest.mark.parametrize("size", _SIZES)
def test_large_messages(size: int) -> None:
    _run(size, "large_messages")


@pytest.mark.parametrize("size", [3])
def test_broadcast(size: int) -> None:
    _run(size, "broadcast_rounds", "thread", 7)


def test_without_bells() -> None:
    """As between hosts: messages are looked for."""
    rounds = 20
    told = _told(_run(3, "solo_without_bells", rounds), 3)
    check_solo([Told(**rank) for rank in told], rounds)  # type: ignore[arg-type]


def test_a_failure_ends_the_job() -> None:
    output = _run(2, "fail_on_rank_1", expected=1)
    assert "rank 1: gradients.0[3], round 2, operation 'divide': ZeroDivisionError: as planned" in output


def test_idle_threads_cost_nothing() -> None:
    seconds = _told(_run(3, "idle"), 3)
    assert sum(seconds) < 0.05  # type: ignore[arg-type]


def test_a_process_ends_its_thread() -> None:
    output = _run(2, "leave_without_closing")
    assert "Traceback" not in output
