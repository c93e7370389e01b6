"""Lanes on devices: Gloo's operations against NumPy, sessions against the host's lanes, the order of segments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from device_cases import (
    differences,
    failed,
    features,
    groups,
    mistakes,
    no_interface,
    operations,
    out_of_reach,
    refusals,
    resumed,
    sessions,
    train,
    with_faults,
)

import hocket
from hocket.testing.job import Job
from hocket.testing.ordered import Begun, OrderedHost, in_one_order
from hocket.transport.host import Failures
from hocket.transport.pending import Progress
from hocket.transport.single import SinglePeer
from hocket.transport.tcp.peer import TcpPeer
from hocket.transport.tcp.wire import Wire

HERE = Path(__file__).parent
# Sums whose order of addition is the backend's own.
SUMS = [
    "sgd",
    "agd",
    "hierarchical_sgd;gradients.0.over.size=2;gradients.0.over.by=null",
    "periodic_average;parameters.0.every=2",
]
GOSSIP = ["dpsgd", "sgp", "overlap_sgp", "local"]


@pytest.fixture(scope="module", params=[*(pytest.param(each, marks=pytest.mark.full) for each in (1, 2)), 4])
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


@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_ranks_over_mpi_have_such_lanes_too(tmp_path: Path) -> None:
    with closing(Job(2, HERE, "mpi")) as job:
        assert all(job.run(operations, (1000,)))
        far = job.run(differences, (["agd", "dpsgd"], str(tmp_path)))
    assert max(summed for summed, _ in far) < 1e-6
    assert all(gossip == 0.0 for _, gossip in far)


FEATURES = ["scaler", "accumulation", "consensus", "uneven"]


def test_features_of_sessions_give_what_they_do_on_the_host_s_lanes(job: Job) -> None:
    for of_rank in job.run(features, (FEATURES, SUMS)):
        assert max(map(max, of_rank)) < 1e-6, of_rank
    for of_rank in job.run(features, (FEATURES, GOSSIP)):
        assert of_rank == [[0.0] * len(GOSSIP)] * len(FEATURES)


def test_steps_with_nan_are_left_out_on_all_ranks(job: Job) -> None:
    """As on the host's lanes, with as many steps left out; parameters with NaN are refused on both."""
    for [far] in job.run(features, (["nan"], SUMS[:3])):
        assert max(far) < 1e-6


def test_runs_go_on_from_checkpoints_of_either_lanes(job: Job, tmp_path: Path) -> None:
    exact, rounded = (
        job.run(resumed, (strategies, str(tmp_path / name)))
        for name, strategies in (("gossip", GOSSIP), ("sums", SUMS))
    )
    assert all(far == [0.0] * 3 * len(GOSSIP) for far in exact)
    assert max(map(max, rounded)) < 1e-6


def test_operations_that_faults_hold_back_keep_their_order(job: Job) -> None:
    layers = [
        f"{name};{slot}.0.segments=layers" for name, slot in (("agd", "gradients"), ("dpsgd", "parameters"))
    ]
    assert all(job.run(with_faults, (layers,)))


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    """Two ranks, whose process groups no other test has made."""
    with closing(Job(2, HERE, "torch")) as job:
        yield job


def test_each_session_has_its_own_timeout(pair: Job) -> None:
    assert all(pair.run(sessions, ()))


def test_a_group_in_which_a_wait_has_failed_is_not_taken_again(pair: Job) -> None:
    (said, works), (_, works_there) = pair.run(failed, ())
    assert said.startswith(
        "rank 0 waits for rank 1 in one (an exchange with neighbours): no end after 0.5 s; rank 1 has not arrived: "
    )
    assert works
    assert works_there


def test_a_store_out_of_reach_is_refused_on_all_ranks(pair: Job) -> None:
    told = pair.run(out_of_reach, ())
    assert {said.partition(" at ")[0] for said, _ in told} == {"rank 1 cannot reach the store of rank 0"}
    assert all(works for _, works in told)


def test_a_rank_that_cannot_connect_is_named(pair: Job) -> None:
    (there, works), (here, works_here) = pair.run(no_interface, ())
    assert there.startswith(
        "rank 0 waits for rank 1 in lanes on cpu (connecting by gloo): no end after 2 s; "
    )
    assert here.startswith("rank 1 could not connect to the other ranks by gloo for lanes on cpu (")
    assert "Unable to find address for: nowhere0). " in here
    assert "Check that ranks can reach each other over the interface in GLOO_SOCKET_IFNAME or" in here
    assert works
    assert works_here


def test_each_job_of_a_process_has_groups_of_its_own() -> None:
    def open_world() -> Any:
        wire = Wire(0, {}, sys.exit)
        return TcpPeer(wire, None, [0], "world", Progress(wire.advance), Failures())

    one, other = open_world(), open_world()
    groups = [peer.on_device("cpu").device_group.process_group for peer in (one, other, one)]
    assert groups[0] is groups[2]
    assert groups[0] is not groups[1]


def test_what_is_not_carried_is_refused() -> None:
    with closing(Job(2, HERE, "torch")) as job:
        for said in job.run(refusals, ()):
            assert len(said) == 3
            assert all("one: lanes on cpu cannot send messages" in each for each in said)
        for compressed, ring, threaded, elsewhere, unknown in job.run(mistakes, ()):
            assert "parameters.0: lanes='gloo' needs uncompressed values" in compressed
            assert "compressor bf16 packs messages in host memory" in compressed
            assert "allreduce packs its own messages" in ring
            assert "`progress: thread` may begin" in threaded
            assert (
                "lanes='nccl' needs all parameters on one cuda device, but this model has them on cpu"
                in elsewhere
            )
            assert "lanes='mpi' is not allowed; allowed: 'host' or 'nccl' or 'gloo'" in unknown


IN_GROUPS = "over: {name: group, size: 2, by: null}"
SHARDED = (
    "hierarchical_sgd;gradients.0.over={name: group, size: 2, by: null, count: null, sharded: true};"
    "gradients.0.segments=layers"
)
REDUCED = (
    f"sgd;gradients=[{{collective: reduce, {IN_GROUPS}, segments: layers, overlap: backward}}, "
    f"{{collective: allreduce, over: {{name: leaders, size: 2, by: null}}, segments: layers}}, "
    f"{{collective: broadcast, {IN_GROUPS}, segments: layers}}]"
)


@pytest.mark.parametrize(
    ("strategy", "operations"),
    [
        ("agd", {"allreduce"}),
        ("dpsgd", {"exchange"}),
        ("overlap_sgp", {"exchange"}),
        ("agd;gradients.0.segments=model", {"allreduce"}),
        (REDUCED, {"reduce", "allreduce", "broadcast"}),
        ("hierarchical_sgd;gradients.0.over.size=2;gradients.0.over.by=null", {"allreduce", "broadcast"}),
        (SHARDED, {"allreduce", "broadcast"}),
        (f"{SHARDED};gradients.0.overlap=none", {"allreduce", "broadcast"}),
        (
            "periodic_average;parameters.0.every=2;parameters.0.over={name: group, size: 2, by: null}",
            {"allreduce"},
        ),
    ],
    ids=[
        "agd",
        "dpsgd",
        "overlap_sgp",
        "one segment",
        "reduce",
        "hierarchical_sgd",
        "sharded",
        "sharded, at the end",
        "groups",
    ],
)
def test_all_ranks_begin_segments_in_one_order(strategy: str, operations: set[str]) -> None:
    """Ranks whose gradients are complete in different orders; on the host's lanes they begin in those."""
    begun: Begun = {}
    found = hocket.virtual(4).run(lambda: train(strategy, "gloo", OrderedHost(hocket.join(), begun)))
    assert found == hocket.virtual(4).run(lambda: train(strategy, "host"))
    assert {what.split()[0] for each in begun.values() for _, what in each} == operations
    assert in_one_order(begun)


def test_segments_that_nobody_holds_begin_in_different_orders() -> None:
    """What the test before this one would show of a session that did not heed `ordered`."""
    begun: Begun = {}
    strategy = "agd;gradients.0.segments=layers"
    hocket.virtual(4).run(lambda: train(strategy, "gloo", OrderedHost(hocket.join(), begun, says_so=False)))
    assert not in_one_order(begun)


def test_one_rank_alone_needs_no_lanes() -> None:
    """It steps outer parameters, and has nobody to exchange them with."""
    strategy = "periodic_average;parameters.0.outer={name: sgd, lr: 0.7}"
    assert train(strategy, "gloo", SinglePeer()) == train(strategy, "host", SinglePeer())
