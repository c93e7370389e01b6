"""Overlap with messages advanced by the training thread in its hooks, and by a progress thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.arrays import Array
from hocket.errors import CompositionError, PeerLostError
from hocket.transport.faults import Faults, KillAt
from hocket.transport.lane import Lane
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer
from hocket.transport.request import FunctionRequest, Request
from hocket.transport.wrapper import WrapperLane, WrapperPeer


def _watched(held: Request, note: Callable[[], None]) -> Request:
    """Return a request that notes when it is looked at or waited for."""

    def done() -> bool:
        note()
        return held.done()

    def wait(timeout_s: float | None) -> None:
        note()
        held.wait(timeout_s)

    return FunctionRequest(done, wait, lambda: held.result, held.withdraw)


class _WatchedLane(WrapperLane):
    def __init__(self, held: Lane, note: Callable[[], None]) -> None:
        super().__init__(held)
        self._note = note

    iexchange = Lane.iexchange  # message by message

    def isend(self, data: Array, to: int, round: int) -> Request:
        return _watched(super().isend(data, to, round), self._note)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        return _watched(super().irecv(data, source, round), self._note)


class _WatchedPeer(WrapperPeer):
    """Notes by which threads messages are looked at, and at which times of its clock."""

    def __init__(self, held: Peer) -> None:
        super().__init__(held)
        self.seen_by: set[int] = set()
        self.looks_s: set[float] = set()

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        return _WatchedLane(held, self._note)

    def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
        group = _WatchedPeer(held)
        group.seen_by, group.looks_s = self.seen_by, self.looks_s
        return group

    def _note(self) -> None:
        self.seen_by.add(threading.get_ident())
        self.looks_s.add(round(self.clock.now(), 3))


RECIPES = {"gossipgrad": "parameters.0.progress", "gossipgrad.gradients": "gradients.0.progress"}


def train(
    recipe: str, *overrides: str, layers: int = 3, width: int = 4, steps: int = 4, charge_s: float = 0.0
) -> Any:
    """Train on this rank; return the session's seconds per step and those in which it waited."""
    peer = hocket.join()

    def charging(layer: nn.Module) -> nn.Module:
        def charge(*_: Any) -> None:
            peer.clock.elapse(charge_s)

        layer.register_forward_pre_hook(charge)
        layer.register_forward_hook(
            lambda *call: call[-1].register_hook(lambda _: peer.clock.elapse(2 * charge_s)) and None
        )
        return layer

    model = nn.Sequential(*(charging(nn.Linear(width, width)) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = hocket.compose(recipe, *overrides)
    with hocket.attach(model, optimizer, strategy) as session:
        data = [torch.ones(2, width)] * (steps + 1)
        start_s = waited_s = 0.0
        for number, x in enumerate(session.data(data)):
            if number == 1:  # in the first forward, the model's reading order is found out
                start_s, waited_s = peer.clock.now(), session.counters.exposed_wait_s
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return (peer.clock.now() - start_s) / steps, (session.counters.exposed_wait_s - waited_s) / steps


@pytest.mark.one_of_each
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_the_chosen_thread_looks_at_the_messages(recipe: str, progress: str) -> None:
    def body() -> bool:
        watched = hocket.join()
        train(recipe, "samples=null", f"{RECIPES[recipe]}={progress}")
        assert isinstance(watched, _WatchedPeer)
        assert watched.seen_by
        return threading.get_ident() in watched.seen_by

    in_training_thread = hocket.virtual(4, wrap=_WatchedPeer).run(body)
    assert in_training_thread == [progress == "inline"] * 4


def test_what_is_one_step_late_is_looked_at_between_layers_of_both_passes() -> None:
    """Else messages that need both ends would stand still."""

    def body() -> set[float]:
        watched = hocket.join()
        assert isinstance(watched, _WatchedPeer)
        train(
            "gossipgrad",
            "samples=null",
            "parameters.0={overlap: none, delay: 1}",
            layers=4,
            steps=2,  # before the second batch ranks wait for each other once
            charge_s=1.0,
        )
        return watched.looks_s

    # 4 layers forward for 1 s each, then back for 2 s each.
    layers_s = (0, 1, 2, 3, 5, 7, 9, 11)
    for looks_s in hocket.virtual(4, network=NetworkModel(100.0), wrap=_WatchedPeer).run(body):
        assert any(all(round(start_s + s, 3) in looks_s for s in layers_s) for start_s in looks_s)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_progress_thread_s_errors_reach_training(recipe: str) -> None:
    """A rank dies: what the others' progress threads then meet is raised by their steps."""
    faults = Faults(kill=KillAt(rank=2, step=2))
    slot = RECIPES[recipe].removesuffix(".progress")

    def body() -> str:
        try:
            train(recipe, "samples=null", f"{slot}.progress=thread", f"{slot}.overlap=none", steps=20)
        except PeerLostError as error:
            return str(error)
        return "went on"

    told = hocket.virtual(4, wrap=faults.wrap).run(body)
    assert told[2] is None
    assert all("rank 2" in told[rank] for rank in (0, 1, 3))


def test_a_collective_with_progress_of_its_own_is_refused() -> None:
    with pytest.raises(CompositionError, match="allreduce cannot use `progress: thread`"):
        hocket.compose("agd", "gradients.0.progress=thread")


LAYERS, WIDTH, COMPUTE_S, EXCHANGE_S = 48, 8, 0.096, 0.027
#: A layer's weights and biases, padded; what a gradient's trailing numbers add is within the tolerances.
_LAYER_BYTES = 4 * (64 + 16)
NETWORK = NetworkModel(1e-5, bandwidth_bits_per_s=8 * LAYERS * _LAYER_BYTES / EXCHANGE_S, poll_s=1e-7)


@pytest.mark.one_of_each
@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_by_layer_an_exchange_hides_behind_computing(recipe: str, progress: str) -> None:
    """The paper's 96 ms of computing and 27 ms of exchange: what shows is a layer's exchange, 1/48."""
    layer_s = COMPUTE_S / LAYERS / 3
    overrides = ["samples=null", f"{RECIPES[recipe]}={progress}"]

    def body() -> Any:
        return train(recipe, *overrides, layers=LAYERS, width=WIDTH, charge_s=layer_s)

    for seconds, waited_s in hocket.virtual(4, network=NETWORK).run(body):
        assert COMPUTE_S <= seconds < 1.02 * COMPUTE_S
        assert waited_s < 1.5 * EXCHANGE_S / LAYERS


def test_without_overlap_all_of_it_shows() -> None:
    def body() -> Any:
        overrides = ["samples=null", "parameters.0.overlap=none"]
        return train("gossipgrad", *overrides, layers=LAYERS, width=WIDTH, charge_s=COMPUTE_S / LAYERS / 3)

    for seconds, _ in hocket.virtual(4, network=NETWORK).run(body):
        assert seconds == pytest.approx(COMPUTE_S + EXCHANGE_S, rel=0.05)
