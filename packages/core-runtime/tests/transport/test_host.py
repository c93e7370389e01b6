"""The host path over real MPI: allreduce over memory that the ranks of a host share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hocket
from hocket.transport.host.memory import FOLDER
from hocket.transport.launching import find_mpiexec

from .host_cases import BIG, contribution

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", params=[2, 3, 5])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every rank's results, by rank."""
    program = [sys.executable, str(Path(__file__).with_name("host_cases.py"))]
    command = find_mpiexec().command(request.param, program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULTS "))
    assert len(found) == request.param
    return found


@pytest.mark.parametrize("case", ["sums", "orders", "groups"])
def test_case(results: list[dict[str, Any]], case: str) -> None:
    assert all(rank[case] is True for rank in results)


def test_the_shared_memory_was_used(results: list[dict[str, Any]]) -> None:
    assert all(rank["over shared memory"] >= 36 + 96 for rank in results)


def test_all_fall_back_to_messages_where_one_has_no_memory(results: list[dict[str, Any]]) -> None:
    assert {rank["falls_back"] for rank in results} == {"/dev/shm: No space left on device"}


def test_the_virtual_transport_gives_the_same_bits(results: list[dict[str, Any]]) -> None:
    import hashlib

    def body() -> str:
        peer = hocket.join()
        receive = np.empty(BIG, dtype="float32")
        send = contribution(peer.rank, 7, BIG, "float32")
        peer.lane("bits").iallreduce(send, receive).wait()
        return hashlib.sha256(receive.tobytes()).hexdigest()

    assert [rank["bits"] for rank in results] == hocket.virtual(len(results)).run(body)


def test_nothing_is_left_in_shared_memory(results: list[dict[str, Any]]) -> None:
    assert not list(FOLDER.glob("hocket-*"))
