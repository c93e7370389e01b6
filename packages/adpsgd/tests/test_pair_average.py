"""Averagings of pairs against the replay of the order in which they took place, and what is true in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pair_cases import NUMELS, Case, noted, replay, start_of, target_of, train, train_on

import hocket
from hocket.collective.api import Choices
from hocket.collective.pair_average import PairAverage
from hocket.collective.pairing import SharedCopy
from hocket.errors import CompositionError, ExchangeTimeoutError, HocketError, PeerLostError
from hocket.progress import ThreadProgress
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment
from hocket.testing.collective import Shape
from hocket.testing.collective.rounds import Case as Rounds
from hocket.testing.collective.rounds import time_round
from hocket.testing.job import Job
from hocket.topology import Complete, RandomMatching, Ring, Topology
from hocket.transport.faults import Faults, KillAt
from hocket.transport.network import NetworkModel
from hocket.transport.virtual import VirtualWorld, current_peer

HERE = Path(__file__).parent
# Each example is a whole training.
NO_SHRINK = [phase for phase in Phase if phase is not Phase.shrink]
#: So that averagings are under way when ranks come together.
LATE = Faults(seed=1, delay_s=(0.0, 0.005))
TOPOLOGIES = ("complete", "ring", "exponential", "random_matching", "irregular_directed")

Told = list[dict[str, Any]]


def simulate(case: Case, ranks: int, faults: Faults | None = None, seed: int = 0) -> Told:
    with noted():
        return VirtualWorld(ranks, seed=seed, wrap=None if faults is None else faults.wrap).run(
            lambda: train(case)
        )


def check(case: Case, told: Told) -> None:
    """Compare what ranks end with, with the replay of what they wrote down."""
    layers = (case.exchange or {}).get("segments") == "layers"
    ends = [0, *(accumulate(NUMELS) if layers else [sum(NUMELS)])]
    got = np.array([of_rank["parameters"] for of_rank in told])
    for segment, (start, stop) in enumerate(pairwise(ends)):
        logs = [of_rank["events"][segment] for of_rank in told]
        expected = replay(logs, slice(start, stop), case.lr)
        np.testing.assert_allclose(got[:, start:stop], expected, rtol=0, atol=1e-14 * max(1, case.steps / 4))
        for of_rank, log in zip(told, logs, strict=True):
            assert sum(event[0] == "enter" for event in log) == case.steps
            assert of_rank["staleness"] >= max(len(e[1]) for e in log if e[0] == "fetch")
    for of_rank in told:
        fetched = [e[1] for log in of_rank["events"] for e in log if e[0] == "fetch"]
        assert of_rank["outcomes"] == len(fetched) == case.steps * (len(ends) - 1)
        given = [e[1] for log in of_rank["events"] for e in log if e[0] in ("fetch", "given")]
        assert of_rank["partners"] == {str(r): n for r, n in Counter(chain(*given)).items()}
        assert of_rank["active"] == sum(1 + len(set(partners)) for partners in fetched)


def mean_of(told: Told) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean([of_rank["parameters"] for of_rank in told], axis=0)
    return mean


def mean_at_start(ranks: int) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean([start_of(rank) for rank in range(ranks)], axis=0)
    return mean


@settings(max_examples=30, deadline=None, phases=NO_SHRINK, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.integers(2, 9),
    steps=st.integers(1, 12),
    topology=st.sampled_from(TOPOLOGIES),
    segments=st.sampled_from(["model", "layers"]),
    delay=st.sampled_from([0, 1]),
    paces_s=st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 0.01]), min_size=1, max_size=9),
    late=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_replay_of_the_recorded_order_gives_the_same_weights(
    ranks: int,
    steps: int,
    topology: str,
    segments: str,
    delay: int,
    paces_s: list[float],
    late: bool,
    seed: int,
) -> None:
    exchange = {"topology": topology, "segments": segments, "delay": delay, "collective.seed": seed}
    case = Case(steps, paces_s, exchange=exchange)
    faults = Faults(seed, delay_s=(0.0, 0.005), reorder=0.2) if late else None
    told = simulate(case, ranks, faults, seed)
    if delay:
        check(case, told)
    still = simulate(Case(steps, paces_s, lr=0.0, exchange=exchange), ranks, faults, seed)
    np.testing.assert_allclose(mean_of(still), mean_at_start(ranks), rtol=0, atol=1e-14 * (steps + 2))


@settings(max_examples=50, deadline=None)
@given(numel=st.integers(0, 40), dtype=st.sampled_from(["float32", "float64"]), seed=st.integers(0, 10**6))
def test_two_copies_move_by_the_same_to_the_bit(numel: int, dtype: str, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    copies = [SharedCopy(numel, np.dtype(dtype)) for _ in range(2)]
    values = [(drawn.standard_normal(numel) * 10.0 ** drawn.integers(-6, 6)).astype(dtype) for _ in copies]
    for rank, copy in enumerate(copies):
        copy.enter(values[rank], 1 - rank)
        assert copy.begin(1 - rank) == 1
    for copy, other in zip(copies, reversed(copies), strict=True):
        copy.received[:] = other.sent
    for rank, copy in enumerate(copies):
        copy.end(1 - rank)
    np.testing.assert_array_equal(copies[0].changes(), -copies[1].changes())
    mean, out = (values[0].astype(float) + values[1]) / 2, np.empty(numel, dtype)
    for rank, copy in enumerate(copies):
        assert copy.fetch(out) == (1 - rank,)
        eps = 4 * np.finfo(dtype).eps * max(np.abs(v).max(initial=0) for v in values)
        np.testing.assert_allclose(out, mean, rtol=0, atol=eps)


def test_runs_on_virtual_ranks_repeat_to_the_bit() -> None:
    case = Case(20, [0.001, 0.004, 0.0015], exchange={"segments": "layers"})
    assert simulate(case, 5) == simulate(case, 5)


def test_a_late_rank_holds_nobody_up_and_is_averaged_with_while_it_computes() -> None:
    told = simulate(Case(40, [0.04, 0.01, 0.01, 0.01]), 4)
    slow, *fast = told
    assert slow["staleness"] > max(2, *(of_rank["active"] / of_rank["outcomes"] - 1 for of_rank in fast))
    for rank, of_rank in enumerate(told):
        assert of_rank["outcomes"] == 40
        assert set(of_rank["partners"]) == {str(other) for other in range(4) if other != rank}
        assert of_rank["bytes"] > 0


def test_one_rank_is_local_bit_for_bit() -> None:
    def local() -> list[float]:
        rank = hocket.join().rank
        values = torch.nn.Parameter(torch.from_numpy(start_of(rank)))
        optimizer = torch.optim.SGD([values], lr=0.1)
        for step in range(12):
            optimizer.zero_grad()
            ((values - torch.from_numpy(target_of(rank, step))).square().sum() / 2).backward()
            optimizer.step()
        return list(values.tolist())

    [alone] = simulate(Case(), 1)
    [expected] = VirtualWorld(1).run(local)
    assert alone["parameters"] == expected


# --- rounds of the channel ---------------------------------------------------------------------------------


def rounds_together(topology: Topology, numel: int, rounds: int) -> Callable[[], list[list[float]]]:
    """Return what ranks do that come to each round together, each with what the round before has left."""

    def body() -> list[list[float]]:
        peer = current_peer()
        assert peer is not None
        spans = partition(named_spans([("p", torch.zeros(numel, dtype=torch.float64))]), Model())[0]
        size = spans[-1].padded_numel + spans[-1].start
        outgoing, incoming = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        segment = Segment("tested[0]", 0, spans, outgoing, incoming)
        progress = ThreadProgress()
        choices = Choices("tested", "parameters", topology)
        channel = PairAverage().open(peer, [segment], progress, choices)
        outgoing[:numel] = torch.from_numpy(np.random.default_rng(peer.rank).standard_normal(numel))
        together, seen = peer.lane("together"), [outgoing[:numel].tolist()]
        for round in range(rounds):
            together.ibarrier().wait()
            outcome = channel.start([segment], round).wait()
            assert outcome.round == round
            assert outcome.num_active == 1 + len(outcome.partners) <= 2
            outgoing.copy_(incoming)
            seen.append(outgoing[:numel].tolist())
        changes = channel.take_changes(segment)
        assert changes is not None
        assert not changes.any()
        channel.close()
        progress.close()
        return seen

    return body


@pytest.mark.parametrize("size", range(1, 10))
def test_a_matching_that_asks_at_once_is_a_step_of_gossip(size: int) -> None:
    """Also where the two have asked each other: they average, and do not swap."""
    topology, rounds = RandomMatching(), 5
    seen = np.array(VirtualWorld(size).run(rounds_together(topology, 9, rounds)))
    for round in range(rounds):
        expected = topology.mixing_matrix(size, round, 0) @ seen[:, round]
        np.testing.assert_allclose(seen[:, round + 1], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_matching_sends_as_many_bytes_as_planned(size: int) -> None:
    numel = 40_000
    worlds = [VirtualWorld(size) for _ in range(2)]
    for world, rounds in zip(worlds, (1, 6), strict=True):
        world.run(rounds_together(RandomMatching(), numel, rounds))
    said = PairAverage().cost(8 * numel, size, RandomMatching(), NetworkModel())
    # Notices are wake-ups, which count for nothing there.
    sent = (worlds[1].num_bytes - worlds[0].num_bytes) / size / 5
    assert sent == pytest.approx(said.bytes, rel=1e-3)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_matching_takes_as_long_as_planned(size: int) -> None:
    exchange = {"collective": "pair_average", "topology": "random_matching"}
    plain = Rounds("parameters", exchange, [Shape(0, 400_000, 0, "float32")], 1).to_json()

    def body() -> float:
        peer = current_peer()
        assert peer is not None
        return time_round(peer, plain)

    said = PairAverage().cost(1_600_000, size, RandomMatching(), NetworkModel()).seconds
    assert VirtualWorld(size).run(body) == pytest.approx([said] * size, rel=0.05)


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomMatching()])
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_partners_are_neighbours_and_each_is_drawn(topology: Topology, size: int) -> None:
    collective = PairAverage(seed=3)
    for rank in range(size):
        drawn = set()
        for round in range(60):
            partner = collective.partner(topology, rank, size, round, 0)
            neighbours = topology.neighbours(rank, size, round, 0).send_to
            assert partner in neighbours if neighbours else partner is None
            drawn.add(partner)
        if isinstance(topology, Ring):
            assert drawn == set(topology.neighbours(rank, size, 0, 0).send_to) or size == 1
    if size > 2 and isinstance(topology, Complete):
        segments = [[collective.partner(topology, 0, size, round, s) for round in range(20)] for s in (0, 1)]
        assert segments[0] != segments[1]


# --- with everything else that sessions do -----------------------------------------------------------------


@pytest.mark.parametrize("topology", ["complete", "ring"])
def test_a_consensus_while_averagings_are_under_way_is_the_mean(topology: str) -> None:
    case = Case(
        9,
        [0.001, 0.0073, 0.0021],
        lr=0.0,
        exchange={"topology": topology},
        consensus=(3, 4, 8),
        settles=(2, 6),
    )
    told = simulate(case, 6)
    check(case, told)
    mean = mean_at_start(6)
    for of_rank in told:
        assert len(of_rank["means"]) == 3
        np.testing.assert_allclose(of_rank["means"], np.broadcast_to(mean, (3, len(mean))), atol=1e-14)
    np.testing.assert_allclose(mean_of(told), mean, atol=1e-14)


def test_one_rank_settles_alone() -> None:
    case = Case(10, [0.001, 0.003, 0.0021], settles=(2, 5, 6, 10))
    check(case, simulate(case, 4))


def test_another_phase_begins_with_the_mean() -> None:
    told = simulate(Case(8, [0.001, 0.0073, 0.0021], lr=0.0, phase=3), 6, LATE)
    assert len({tuple(of_rank["parameters"]) for of_rank in told}) == 1
    np.testing.assert_allclose(mean_of(told), mean_at_start(6), atol=1e-14)


def test_a_checkpoint_loses_no_change(tmp_path: Path) -> None:
    paces_s, ranks = [0.001, 0.0073, 0.0021], 5
    saved = simulate(Case(6, paces_s, lr=0.0, save=str(tmp_path)), ranks, LATE)
    resumed = simulate(Case(7, paces_s, lr=0.0, load=str(tmp_path)), ranks)
    np.testing.assert_allclose(mean_of(saved), mean_at_start(ranks), atol=1e-14)
    np.testing.assert_allclose(mean_of(resumed), mean_at_start(ranks), atol=1e-14)
    spread = [np.std([of_rank["parameters"] for of_rank in told], axis=0).sum() for told in (saved, resumed)]
    assert spread[1] < spread[0]


def test_a_dead_partner_is_named() -> None:
    def body() -> str:
        try:
            train(Case(40, [0.001, 0.002]))
        except PeerLostError as error:
            return str(error)
        return ""

    told = VirtualWorld(4, wrap=Faults(kill=KillAt(rank=2, step=5)).wrap).run(body)
    assert told[2] is None
    for rank in (0, 1, 3):
        assert f"rank {rank} " in told[rank]
        assert "rank 2" in told[rank], told[rank]
        assert "was killed" in told[rank]


def test_a_partner_that_does_not_come_is_named() -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, hocket.compose("adpsgd")) as session:
            if session.rank == 1:
                session.peer.clock.sleep(1e4)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.settle()

    told = r"rank 0 .*averaging 0 of parameters\.0\[0\], whose averagings wait here for rank 1 to agree"
    with pytest.raises(ExchangeTimeoutError, match=told):
        VirtualWorld(2, timeout_s=10.0).run(body)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"delay": "0", "merge": "{name: blend, local: 0.5}"},
            "a blend would lose a share of each change: use merge: add",
        ),
        ({"topology": "null"}, "needs one: for instance topology: complete"),
        ({"compressor": "fp16"}, "sends values whole: use none"),
        ({"outer": "{name: sgd, lr: 1.0}"}, "use collective: allreduce"),
        ({"progress": "thread"}, "brings its own schedule"),
        ({"buffers": "mean"}, "buffers: own"),
        ({"collective.seed": -1}, "seed is -1"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], told: str) -> None:
    overrides = [f"parameters.0.{key}={value}" for key, value in given.items()]
    with pytest.raises(HocketError) as caught:
        hocket.compose("adpsgd", *overrides)
    assert told in str(caught.value)


def test_gradients_are_refused() -> None:
    with pytest.raises(CompositionError, match=r"pair_average .* means nothing here: use it in parameters"):
        hocket.compose({"gradients": [{"collective": "pair_average", "topology": "complete"}]})


# --- over processes ----------------------------------------------------------------------------------------


def jobs() -> Sequence[Any]:
    mpi = [
        pytest.mark.mpi,
        pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
    ]
    return [*(pytest.param(("mpi", size), marks=mpi) for size in (2, 4)), ("torch", 2)]


@pytest.fixture(scope="module", params=jobs(), ids=lambda given: f"{given[0]}-{given[1]}")
def job(request: pytest.FixtureRequest) -> Iterator[tuple[int, Job]]:
    transport, size = request.param
    with closing(Job(size, HERE, transport)) as ranks:
        yield size, ranks


@pytest.mark.parametrize("topology", ["complete", pytest.param("ring", marks=pytest.mark.full)])
def test_over_processes_the_replay_gives_the_same_weights(job: tuple[int, Job], topology: str) -> None:
    size, ranks = job
    paces_s = [0.004, *[0.001] * (size - 1)]
    exchange = {"topology": topology, "segments": "layers"}
    case = Case(30, paces_s, exchange=exchange, settles=(5, 11))
    check(case, ranks.run(train_on, (asdict(case),)))


def test_over_processes_consensus_close_and_checkpoints_keep_the_mean(
    job: tuple[int, Job], tmp_path: Path
) -> None:
    size, ranks = job
    paces_s = [0.004, *[0.001] * (size - 1)]
    case = Case(20, paces_s, lr=0.0, consensus=(7, 13), save=str(tmp_path))
    told = ranks.run(train_on, (asdict(case),))
    mean = mean_at_start(size)
    for of_rank in told:
        np.testing.assert_allclose(of_rank["means"], np.broadcast_to(mean, (2, len(mean))), atol=1e-14)
    np.testing.assert_allclose(mean_of(told), mean, atol=1e-14)
    resumed = ranks.run(train_on, (asdict(Case(9, paces_s, lr=0.0, load=str(tmp_path))),))
    np.testing.assert_allclose(mean_of(resumed), mean, atol=1e-14)


def test_both_ends_of_an_averaging_count_it() -> None:
    def body() -> tuple[int, dict[int, int]]:
        peer = hocket.join()
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drawing = np.random.default_rng(peer.rank)
        with hocket.attach(model, optimizer, "adpsgd") as session:
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.from_numpy(drawing.standard_normal((3, 4))).float()).square().mean().backward()
                optimizer.step()
                peer.clock.sleep(drawing.exponential(0.01))
            early = sum(session.counters.partners.values())
            with session.consensus():
                pass
            return early, dict(session.counters.partners)

    told = hocket.virtual(4, seed=1).run(body)
    counted = [[partners.get(other, 0) for other in range(4)] for _, partners in told]
    assert counted == [list(column) for column in zip(*counted, strict=True)]
    assert sum(map(sum, counted)) > sum(early for early, _ in told), "some came after ranks had ended"
