"""A trace of virtual ranks: every message joined, every phase and wait at its time, also where a run broke off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schema import Loaded, load
from torch import nn

import hocket
from hocket.errors import DisagreementError, HocketError, UserError
from hocket.trace import merge_left
from hocket.trace.perfetto import perfetto_trace
from hocket.trace.record import Recorder, SpanKind, read
from hocket.transport.peer import Peer

STEPS, WIDTH = 3, 16
FORWARD_S = 0.25


def train(path: Path, *strategy: str, lost: int | None = None, window: tuple[int, int] | None = None) -> None:
    """Train on this rank; rank `lost` is late for the last step's exchange, by far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peer = hocket.join()
    trace = hocket.Trace(path, window)
    with hocket.attach(model, optimizer, hocket.compose(*strategy), observer=trace) as session:
        for number, x in enumerate(session.data([torch.randn(2, WIDTH) for _ in range(STEPS)])):
            peer.clock.elapse(FORWARD_S if peer.rank != lost or number < STEPS - 1 else 1000.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


STRATEGIES = {
    "sgd": ["sgd"],
    "layers": ["agd", "gradients.0.segments=layers"],
    "gossip": ["dpsgd", "parameters.0.segments=layers"],
    "gossip delayed": ["dpsgd", "parameters.0.delay=1"],
    "forward": ["periodic_average", "parameters.0.every=2", "parameters.0.overlap=forward"],
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_trace_keeps_the_rules(strategy: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    hocket.virtual(ranks).run(lambda: train(path, *STRATEGIES[strategy]))
    trace = load(path, ranks)
    assert trace.other["unjoined_messages"] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    if "gossip" in strategy and ranks > 1:
        segments = 2 if "delayed" not in strategy else 1
        neighbours = min(ranks - 1, 2)
        assert len(trace.arrows) == ranks * STEPS * segments * neighbours
    for rank in range(ranks):
        assert [s["name"] for s in trace.slices(rank, "step")] == [f"step {n}" for n in range(STEPS)]


def test_times_are_those_of_the_virtual_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    hocket.virtual(2).run(lambda: train(path, "sgd"))
    trace = load(path, 2)
    for rank in range(2):
        phases = trace.slices(rank, "phase")
        # An optimizer's step takes no virtual time.
        assert [s["name"] for s in phases] == ["forward", "backward"] * STEPS
        assert [s["dur"] for s in phases[::2]] == pytest.approx([1e6 * FORWARD_S] * STEPS)
        waits = trace.slices(rank, "exposed wait")
        exchanges = trace.exchanges(rank)
        assert [w["name"] for w in waits] == ["exposed wait for gradients.0[0]"] * STEPS
        assert [b["args"]["round"] for b, _ in exchanges] == list(range(STEPS))
        for wait, backward, (begin, end) in zip(waits, phases[1::2], exchanges, strict=True):
            assert wait["ts"] == begin["ts"] == pytest.approx(backward["ts"])
            assert wait["ts"] + wait["dur"] == pytest.approx(end["ts"])


def test_exchanges_that_overlap_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    hocket.virtual(2).run(lambda: train(path, *STRATEGIES["layers"]))
    exchanges = load(path, 2).exchanges(0)
    assert {begin["name"] for begin, _ in exchanges} == {"gradients.0[0]", "gradients.0[1]"}
    first, second = exchanges[:2]
    assert first[0]["ts"] <= second[0]["ts"] < first[1]["ts"]


def traced(size: int, body: Callable[[Peer], object], path: Path) -> Loaded:
    """Trace what ranks do with a transport."""

    def run() -> None:
        trace = hocket.Trace(path)
        body(trace.join(hocket.join()))
        trace.close()

    hocket.virtual(size).run(run)
    return load(path, size)


def test_lanes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    # In every lane the same round: only the lane says which send belongs to which receive.
    def body(peer: Peer) -> None:
        lanes = [peer.lane("x"), peer.lane("x")]
        group = peer.group([0, 2] if peer.rank != 1 else [1])
        assert group is not None
        lanes.append(group.lane("x"))
        for length, lane in enumerate(lanes, start=1):
            if lane.size > 1 and lane.rank < 2:
                other = 1 - lane.rank
                receive = lane.irecv(np.empty(length), other, 0)
                lane.isend(np.ones(length), other, 0).wait()
                receive.wait()

    trace = traced(3, body, tmp_path / "trace.json")
    assert len(trace.arrows) == 6
    lanes = {send["name"].partition(" to ")[0]: send["args"]["bytes"] for send, _ in trace.arrows}
    assert lanes == {"send x": 8, "send x #2": 16, "send x of ranks 0 2": 24}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_messages_are_joined_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[int], random: Random
) -> None:
    expected = list(rounds)
    random.shuffle(expected)

    def lengths(rounds: list[int]) -> list[np.ndarray]:
        """Each message has another length, so that the rules see which one an arrow ends at."""
        seen: Counter[int] = Counter()
        buffers = []
        for round in rounds:
            seen[round] += 1
            buffers.append(np.zeros(20 * round + seen[round]))
        return buffers

    def body(peer: Peer) -> None:
        lane = peer.lane("x")
        if peer.rank == 0:
            requests = [
                lane.isend(buffer, 1, round) for round, buffer in zip(rounds, lengths(rounds), strict=True)
            ]
        else:
            requests = [
                lane.irecv(buffer, 0, round)
                for round, buffer in zip(expected, lengths(expected), strict=True)
            ]
        for request in requests:
            request.wait()

    trace = traced(2, body, tmp_path_factory.mktemp("trace") / "trace.json")
    assert len(trace.arrows) == len(rounds)
    assert trace.other["unjoined_messages"] == 0


def test_a_receive_that_is_withdrawn_is_joined_to_nothing(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        lane = peer.lane("x")
        if peer.rank == 1:
            lane.irecv(np.empty(1), 0, 0).withdraw()
            lane.irecv(np.empty(2), 0, 0).wait()
        else:
            peer.clock.elapse(1.0)
            lane.isend(np.empty(2), 1, 0).wait()

    trace = traced(2, body, tmp_path / "trace.json")
    [(_, receive)] = trace.arrows
    assert receive["args"]["bytes"] == 16
    [withdrawn, _] = trace.slices(1, "receive")
    assert withdrawn["args"]["error"] == "withdrawn"


def test_a_send_that_is_dropped_is_joined_all_the_same(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        lane = peer.lane("x")
        if peer.rank == 0:
            for round in range(100):
                lane.isend(np.empty(1), 1, round)
                peer.clock.elapse(1e-3)
        else:
            for round in range(100):
                lane.irecv(np.empty(1), 0, round).wait()

    trace = traced(2, body, tmp_path / "trace.json")
    assert len(trace.arrows) == 100
    # None of them is taken to go on until the end.
    assert len({send["tid"] for send in trace.slices(0, "send")}) == 1


def test_a_run_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(HocketError):
        hocket.virtual(2, timeout_s=1.0).run(lambda: train(path, "sgd", lost=1))
    assert not path.exists()
    assert merge_left(path)
    trace = load(path, 2)
    *whole, (begin, end) = trace.exchanges(0)
    assert all("error" not in b["args"] for b, _ in whole)
    assert (begin["name"], begin["args"]["round"]) == ("gradients.0[0]", STEPS - 1)
    assert begin["args"]["error"].startswith("ExchangeTimeoutError: rank 0 ")
    assert end["ts"] - begin["ts"] == pytest.approx(1e6)


def test_nothing_is_left_of_nothing(tmp_path: Path) -> None:
    assert not merge_left(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_what_an_older_run_left_is_not_taken_in(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(HocketError):
        hocket.virtual(3, timeout_s=1.0).run(lambda: train(path, "sgd", lost=1))
    merge_left(path)
    hocket.virtual(2).run(lambda: train(path, "sgd"))
    load(path, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


@given(st.integers(0, 10**6))
def test_a_recording_that_breaks_off_anywhere_is_read(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rank-0000.jsonl"
    times = iter(range(1000))
    recorder = Recorder(path, 0, 1, "virtual", lambda: float(next(times)))
    for round in range(3):
        outer = recorder.begin(SpanKind.EXCHANGE, 'with "quotes"', round, 100)
        recorder.end(recorder.begin(SpanKind.COLLECTIVE, "allreduce", num_bytes=100))
        recorder.end(outer, ValueError("odd\nerror"))
    recorder.close()
    data = path.read_bytes()
    header = data.index(b"\n") + 1
    recording = read(data[: header + cut % (len(data) - header + 1)])
    assert all(span.end_s >= span.start_s for span in recording.spans)
    assert all(
        span.error == "ValueError: odd\nerror"
        for span in recording.spans
        if span.kind == "exchange" and span.ended
    )
    json.loads(perfetto_trace([recording]))


def test_a_trace_belongs_to_one_session(tmp_path: Path) -> None:
    def body() -> None:
        trace = hocket.Trace(tmp_path / "trace.json")
        trace.join(hocket.join())
        with pytest.raises(HocketError, match="another one"):
            trace.join(hocket.join())
        trace.abandon()

    hocket.virtual(2).run(body)


def test_all_ranks_trace_or_none(tmp_path: Path) -> None:
    def body() -> None:
        model = nn.Linear(2, 2)
        observer = hocket.Trace(tmp_path / "trace.json") if hocket.join().rank == 0 else None
        hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd", observer=observer)

    with pytest.raises(DisagreementError, match='observer: "Trace" on rank 0'):
        hocket.virtual(2).run(body)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trace .*/file/trace.json cannot be written: Not a directory"):
        hocket.virtual(2).run(lambda: hocket.Trace(tmp_path / "file" / "trace.json").join(hocket.join()))


@pytest.mark.parametrize("strategy", ["layers", "gossip delayed"])
def test_a_window_holds_its_steps_and_what_began_in_them(strategy: str, tmp_path: Path) -> None:
    whole, window = tmp_path / "whole.json", tmp_path / "window.json.gz"
    hocket.virtual(2).run(lambda: train(whole, *STRATEGIES[strategy]))
    hocket.virtual(2).run(lambda: train(window, *STRATEGIES[strategy], window=(1, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole.json", "window.json.gz"]
    every, seen = load(whole, 2), load(window, 2)
    for rank in range(2):
        step = every.slices(rank, "step")[1]
        [found] = seen.slices(rank, "step")
        assert (found["name"], found["dur"]) == ("step 1", pytest.approx(step["dur"]))
        assert [phase["name"] for phase in seen.slices(rank, "phase")] == [
            phase["name"]
            for phase in every.slices(rank, "phase")
            if step["ts"] <= phase["ts"] < step["ts"] + step["dur"]
        ]
        begun = [
            (begin["name"], begin["args"], round(end["ts"] - begin["ts"], 2))
            for begin, end in every.exchanges(rank)
            if begin["args"]["round"] == 1
        ]
        told = [(b["name"], b["args"], round(e["ts"] - b["ts"], 2)) for b, e in seen.exchanges(rank)]
        assert told == begun != []
        assert not any("unfinished" in begin["args"] for begin, _ in seen.exchanges(rank))


def test_a_window_without_steps_is_refused() -> None:
    for steps in ((3, 3), (-1, 2)):
        with pytest.raises(ValueError, match="are empty; allowed: the first step, counted from 0"):
            hocket.Trace("trace.json", steps)
