"""The same over MPI: real threads, real messages, wake-ups between processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from bodies import ALLREDUCES, ENGINES

from hocket.launch.mpiexec import find_mpiexec

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

_RANK = Path(__file__).with_name("mpi_rank.py")
_SIZES = (3, *(pytest.param(each, marks=pytest.mark.full) for each in (2, 5)))
_ROUNDS = 40
_COUNTS = (0, 1, 7, 5003)

# What one job of each size carries out: a function of `bodies` and its arguments.
_CALLED = [
    *[["called_rounds", 1, _ROUNDS, 5, allreduce, 10.0] for allreduce in ALLREDUCES],
    ["called_without_wakes", _ROUNDS],
]
_ALLREDUCES = [
    ["allreduce_rounds", 3, engine, kind, count, dtype]
    for engine, (kind, dtype), count in product(
        ENGINES,
        [("ring", "float32"), ("recursive doubling", "float64"), ("rabenseifner", "float32")],
        _COUNTS,
    )
]
_OTHERS: list[list[object]] = [["large_messages"], ["broadcast_rounds", "thread", 7], ["idle"]]


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("number", range(len(_CALLED)))
def test_called_rounds(size: int, number: int) -> None:
    assert [rank[number] for rank in _results(size)] == [[size] * _ROUNDS] * size


@pytest.mark.parametrize("size", _SIZES)
def test_allreduces_have_the_same_bits_everywhere(size: int) -> None:
    told = [rank[len(_CALLED) : len(_CALLED) + len(_ALLREDUCES)] for rank in _results(size)]
    assert told == [told[0]] * size
    assert all(told[0])


@pytest.mark.parametrize("size", _SIZES)
def test_idle_threads_cost_nothing(size: int) -> None:
    assert sum(rank[-1] for rank in _results(size)) < 0.02


def test_a_failure_ends_the_job() -> None:
    status, output = _run(2, [["fail_on_rank_1"]])
    assert status != 0
    assert (
        "rank 1: gradients.0[3] failed in round 2 at operation 'divide': ZeroDivisionError: as planned"
        in output
    )


def test_a_process_ends_its_thread() -> None:
    status, output = _run(2, [["leave_without_closing"]])
    assert status == 0, output
    assert "Traceback" not in output


@cache
def _results(size: int) -> list[list[Any]]:
    """Return what each rank's calls returned."""
    status, output = _run(size, [*_CALLED, *_ALLREDUCES, *_OTHERS])
    assert status == 0, output
    by_rank = dict(json.loads(line) for line in output.splitlines() if line.startswith("["))
    return [by_rank[rank] for rank in range(size)]


def _run(size: int, calls: list[list[Any]]) -> tuple[int, str]:
    program = [sys.executable, str(_RANK), json.dumps(calls)]
    with tempfile.TemporaryDirectory() as folder:
        command = find_mpiexec().command(size, program, folder=Path(folder))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout + done.stderr
