"""Bodies of the tests of lanes on devices, carried out by ranks that are processes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import AttachError, HocketError, TransportError
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer

STEPS = 6


def drawn(rank: int, number: int, numel: int) -> np.ndarray[Any, Any]:
    """What a rank gives: whole numbers, so that every order of adding up gives the same."""
    return np.random.default_rng([rank, number]).integers(-9, 9, numel).astype(np.float32)


def operations(world: Peer, numel: int) -> bool:
    """Every operation of two lanes, begun one after the other and waited for in another order, against NumPy."""
    peer = world.on_device("cpu")
    assert peer is not None
    assert (peer.transport, peer.device, peer.ordered) == ("gloo", "cpu", True)
    lanes = [peer.lane("one"), peer.lane("other")]
    given = [[drawn(rank, number, numel) for rank in range(peer.size)] for number in range(4)]
    own, sums = [each[peer.rank].copy() for each in given], [np.empty(numel, np.float32) for _ in range(4)]
    root, following = peer.size - 1, (peer.rank + 1) % peer.size
    begun = [
        lanes[0].iallreduce(own[0], sums[0]),
        lanes[1].iallreduce(own[1], own[1]),
        lanes[0].ibroadcast(own[2], root),
        lanes[1].ireduce(own[3], sums[3] if peer.rank == root else None, root),
        _around(lanes[0], own[0], sums[1], following),
        lanes[1].iexchange([], [], 0),
        lanes[0].ibarrier(),
    ]
    for request in reversed(begun):
        request.wait()
        assert request.done()
    np.testing.assert_array_equal(sums[0], sum(given[0]))
    np.testing.assert_array_equal(own[0], given[0][peer.rank])
    np.testing.assert_array_equal(own[1], sum(given[1]))
    np.testing.assert_array_equal(own[2], given[2][root])
    np.testing.assert_array_equal(own[3], given[3][peer.rank])
    if peer.rank == root:
        np.testing.assert_array_equal(sums[3], sum(given[3]))
    np.testing.assert_array_equal(sums[1], given[0][(peer.rank - 1) % peer.size])
    return True


def _around(lane: Lane, sent: Any, received: Any, following: int) -> Any:
    before = (lane.rank - 1) % lane.size
    if lane.size == 1:
        received[:] = sent
        return lane.iexchange([], [], 0)
    return lane.iexchange([(sent, following)], [(received, before)], 0)


def refusals(world: Peer) -> list[str]:
    """What is said of what such lanes do not carry."""
    peer = world.on_device("cpu")
    assert peer is not None
    lane, data = peer.lane("one"), np.zeros(3, np.float32)
    told = []
    for call in (
        functools.partial(lane.isend, data, 0, 0),
        functools.partial(lane.irecv, data, 0, 0),
        functools.partial(lane.iallgather, data, data),
    ):
        try:
            call()
        except TransportError as error:
            told.append(str(error))
    return told


def groups(world: Peer) -> bool:
    """Groups have process groups of their own, which are made once."""
    peer = world.on_device("cpu")
    assert peer is not None
    members = [rank for rank in range(peer.size) if rank % 2 == peer.rank % 2]
    for _ in range(2):
        group = peer.group(members)
        assert group is not None
        assert group.device == "cpu"
        total = np.empty(2, np.float32)
        group.lane("one").iallreduce(np.full(2, peer.rank, np.float32), total).wait()
        assert total.tolist() == [float(sum(members))] * 2
    return peer.on_device("meta") is None


class Branches(nn.Module):
    """Layers, one of which another rank calls first, or not at all: gradients are complete in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.branches[number](x).relu()
        y: Tensor = self.last(x)
        return y


def train(strategy: str, lanes: Any, peer: Peer | None = None, save: str | None = None) -> list[float]:
    """Return parameters that ranks have trained whose gradients are complete in different orders."""
    recipe, *overrides = strategy.split(";")
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with hocket.attach(
        model, optimizer, hocket.compose(recipe, *overrides), lanes=lanes, peer=peer
    ) as session:
        drawing = np.random.default_rng(session.rank)
        for step in range(STEPS):
            if save is not None and step == STEPS // 2:
                session.save(save)
                for parameter in model.parameters():
                    parameter.data.zero_()
                session.load(save)
            order = drawing.permutation(4)[: drawing.integers(1, 5)].tolist()
            optimizer.zero_grad()
            x = torch.from_numpy(drawing.standard_normal((4, 5)).astype(np.float32))
            model(x, order).square().mean().backward()
            optimizer.step()
        session.settle()
    return [each for parameter in model.parameters() for each in parameter.detach().flatten().tolist()]


def differences(world: Peer, strategies: list[str], folder: str) -> list[float]:
    """Return how far parameters are apart with lanes on the device and with the host's, for each strategy."""
    far = []
    for number, strategy in enumerate(strategies):
        host = train(strategy, "host", world)
        found = train(strategy, "gloo", world, save=f"{folder}/{number}")
        far.append(max(abs(one - other) for one, other in zip(host, found, strict=True)))
    return far


def mistakes(world: Peer) -> list[str]:
    """What is said of strategies, models and devices that these lanes do not carry."""
    told = []
    for strategy, lanes in (
        ("dpsgd;parameters.0.compressor=bf16", "gloo"),
        ("sgd;gradients.0.collective={name: allreduce, algorithm: ring}", "gloo"),
        ("dpsgd;parameters.0.progress=thread;parameters.0.delay=1;parameters.0.overlap=none", "gloo"),
        ("sgd", "nccl"),
        ("sgd", "mpi"),
    ):
        try:
            train(strategy, lanes, world)
        except (AttachError, HocketError) as error:
            told.append(str(error))
    return told
