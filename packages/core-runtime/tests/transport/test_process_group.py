"""Lanes on devices: Gloo's operations against NumPy, sessions against the host's lanes, the order of segments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from process_group_cases import differences, groups, mistakes, operations, refusals, train

import hocket
from hocket.testing.job import Job
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.wrapper import WrapperLane, WrapperPeer

HERE = Path(__file__).parent
# Sums whose order of addition is the backend's own.
SUMS = [
    "sgd",
    "agd",
    "hierarchical_sgd;gradients.0.over.size=2;gradients.0.over.by=null",
    "periodic_average;parameters.0.every=2",
]
GOSSIP = ["dpsgd", "sgp", "overlap_sgp", "local"]


@pytest.fixture(scope="module", params=[1, 2, 4])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Ranks over transport torch."""
    with closing(Job(request.param, HERE, "torch")) as job:
        yield job


def test_operations_give_what_numpy_does(job: Job) -> None:
    for numel in (0, 1, 1000):
        assert all(job.run(operations, (numel,)))


def test_groups(job: Job) -> None:
    assert all(job.run(groups, ()))


def test_sessions_train_as_on_the_host_s_lanes(job: Job, tmp_path: Path) -> None:
    """Whichever order gradients are complete in, with a checkpoint that is loaded on the way."""
    far = job.run(differences, ([*SUMS, *GOSSIP], str(tmp_path)))
    assert all(each[len(SUMS) :] == [0.0] * len(GOSSIP) for each in far)
    assert max(max(each[: len(SUMS)]) for each in far) < 1e-6


def test_what_is_not_carried_is_refused() -> None:
    with closing(Job(2, HERE, "torch")) as job:
        for said in job.run(refusals, ()):
            assert len(said) == 3
            assert all("one: lanes on cpu carry no messages" in each for each in said)
        for compressed, ring, threaded, elsewhere, unknown in job.run(mistakes, ()):
            assert "parameters.0: lanes='gloo' carries whole values" in compressed
            assert "compressor bf16 packs messages in host memory" in compressed
            assert "allreduce sends messages of its own making" in ring
            assert "progress: thread begins" in threaded
            assert (
                "lanes='nccl' carries parameters on one cuda device, and this model has them on cpu"
                in elsewhere
            )
            assert "lanes='mpi' is not allowed: 'host' or 'nccl' or 'gloo'" in unknown


class _OrderedLane(WrapperLane):
    """Notes in which order operations begin, and refuses another one than the first rank's."""

    def __init__(self, held: Lane, begun: list[str], number: list[int]) -> None:
        super().__init__(held)
        self._begun, self._number = begun, number

    def _begin(self, what: str) -> None:
        own, self._number[0] = f"{what} of {self.name}", self._number[0] + 1
        if len(self._begun) < self._number[0]:
            self._begun.append(own)
        assert self._begun[self._number[0] - 1] == own

    def iallreduce(self, *args: Any) -> Any:
        self._begin("allreduce")
        return super().iallreduce(*args)

    def iexchange(self, *args: Any) -> Any:
        self._begin("exchange")
        return super().iexchange(*args)


class _OrderedPeer(WrapperPeer):
    """The virtual ranks' peer as one of a device whose lanes are ordered."""

    def __init__(self, held: Peer, begun: list[str]) -> None:
        super().__init__(held)
        self.ordered = True
        self._begun, self._number = begun, [0]

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        return _OrderedLane(held, self._begun, self._number)


class _Host(WrapperPeer):
    def __init__(self, held: Peer, begun: list[str]) -> None:
        super().__init__(held)
        self._begun = begun

    def on_device(self, device: str) -> Peer:
        return _OrderedPeer(self.held, self._begun)


@pytest.mark.parametrize("strategy", ["agd", "dpsgd", "overlap_sgp", "agd;gradients.0.segments=model"])
def test_all_ranks_begin_segments_in_one_order(strategy: str) -> None:
    """Ranks whose gradients are complete in different orders; on the host's lanes they begin in those."""
    begun: list[str] = []
    found = hocket.virtual(4).run(lambda: train(strategy, "gloo", _Host(hocket.join(), begun)))
    assert found == hocket.virtual(4).run(lambda: train(strategy, "host"))
    assert begun
