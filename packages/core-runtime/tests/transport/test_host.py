"""The host path over real MPI: collectives over memory that the ranks of a host share, and where they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_cases import BIG, ROUNDS, contribution, in_place

import hocket
from hocket.launch.mpiexec import find_mpiexec
from hocket.transport.single import SinglePeer

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("afresh")]  # ranks look that nothing imports torch


@pytest.fixture(scope="module", params=[3, *(pytest.param(each, marks=pytest.mark.full) for each in (2, 5))])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every rank's results, by rank."""
    program = [sys.executable, str(Path(__file__).with_name("host_cases.py"))]
    command = find_mpiexec().command(request.param, program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULTS "))
    assert len(found) == request.param
    return found


@pytest.mark.parametrize(
    ("case", "least_exchanges"),
    [
        ("sums", 32),
        ("in_place", 2),
        ("orders", 48),
        ("broadcasts", 6),
        ("mixes", 32),
        ("mixes_in_another_order", 16),
        ("mixes_together", 6),
        ("only_neighbours_wait", 4),
        ("dropped_mixing", 1),
        ("two_threads_advance", 2 * ROUNDS),
        ("groups", 0),  # a group may have one rank
    ],
)
def test_case(results: list[dict[str, Any]], case: str, least_exchanges: int) -> None:
    for rank in results:
        assert rank[case]["result"] is True
        assert rank[case]["over shared memory"] >= least_exchanges


def test_ranks_that_disagree_are_told_before_memory_is_written(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        message = rank["disagreement"]["result"]
        assert f"rank {number}: at odds, exchange 1 over shared memory" in message
        assert ("but ranks 0 called something else" in message) == (number > 0)


def test_all_fall_back_to_messages_where_one_has_no_memory(results: list[dict[str, Any]]) -> None:
    expected = {"result": "shared memory: No space left on device", "over shared memory": 0}
    assert all(rank["falls_back"] == expected for rank in results)
    assert all(rank["gossip_falls_back"] == {"result": True, "over shared memory": 0} for rank in results)


def test_all_fall_back_to_messages_where_memory_is_out_of_sight(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["cannot_be_opened"]["result"].startswith(
            "memory of rank 0 cannot be opened through /proc: "
        )
        assert rank["cannot_be_opened"]["over shared memory"] == 0


def test_the_virtual_transport_gives_the_same_bits(results: list[dict[str, Any]]) -> None:
    import hashlib

    def body() -> str:
        peer = hocket.join()
        receive = np.empty(BIG, dtype="float32")
        send = contribution(peer.rank, 7, BIG, "float32")
        peer.lane("bits").iallreduce(send, receive).wait()
        return hashlib.sha256(receive.tobytes()).hexdigest()

    assert [rank["bits"] for rank in results] == hocket.virtual(len(results)).run(body)


def test_in_place_on_transports_without_shared_memory() -> None:
    assert hocket.virtual(3).run(lambda: in_place(hocket.join())) == [True] * 3
    assert in_place(SinglePeer())


def test_shared_memory_has_no_name_while_it_is_used(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["mapped"]
        assert all(line.endswith(" (deleted)") for line in rank["mapped"])
