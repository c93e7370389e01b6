"""Bodies of the tests of lanes on devices, carried out by ranks that are processes."""

from __future__ import annotations

import functools
import os
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import AttachError, HocketError, TransportError
from hocket.transport.device import groups as opening
from hocket.transport.device.lanes import ProcessGroupPeer
from hocket.transport.faults import Faults
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather

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


def on_cpu(world: Peer) -> ProcessGroupPeer:
    """Return the ranks for buffers of the CPU."""
    peer = world.on_device("cpu")
    assert isinstance(peer, ProcessGroupPeer)
    return peer


def add_up(peer: Peer) -> bool:
    """Return whether the ranks' lanes work."""
    total = np.empty(2, np.float32)
    peer.lane("one").iallreduce(np.full(2, 1 + peer.rank, np.float32), total).wait()
    return total.tolist() == [peer.size * (peer.size + 1) / 2] * 2


def sessions(world: Peer) -> bool:
    """The timeout of the session that waits counts, not that of the one before it."""
    longest_s, world.timeout_s = world.timeout_s, 1.0
    first = on_cpu(world)
    works = add_up(first)
    world.timeout_s = longest_s
    second = on_cpu(world)
    time.sleep(3.0 * world.rank)
    return works and add_up(second) and first.device_group.process_group is second.device_group.process_group


def failed(world: Peer) -> tuple[str, bool]:
    """What rank 0 says of an exchange that rank 1 never begins, and whether both get on with another group then."""
    first, said = on_cpu(world), ""
    if world.rank == 0:
        data = np.zeros(3, np.float32)
        try:
            first.lane("one").iexchange([(data, 1)], [(data.copy(), 1)], 0).wait(0.5)
        except TransportError as error:
            said = str(error)
    gather(world, None)
    second = on_cpu(world)
    return said, add_up(second) and second.device_group.process_group is not first.device_group.process_group


def out_of_reach(world: Peer) -> tuple[str, bool]:
    """What is said of a store that rank 1 cannot reach, and whether the ranks get on when it can."""
    on_cpu(world).device_group.give_up()
    elsewhere = world.rank == 1
    with (
        mock.patch.object(opening, "host_addresses", return_value=["192.0.2.1"]),  # of RFC 5737: nobody's
        mock.patch.object(opening, "network_host", return_value=f"elsewhere {elsewhere}"),
    ):
        said = _refusal(world)
    return said, add_up(on_cpu(world))


def no_interface(world: Peer) -> tuple[str, bool]:
    """What is said where one rank's backend has no interface to connect by, and whether the ranks get on after that."""
    on_cpu(world).device_group.give_up()
    longest_s, world.timeout_s = world.timeout_s, 2.0
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nowhere0"} if world.rank == 1 else {}):
        said = _refusal(world)
    world.timeout_s = longest_s
    gather(world, None)
    return said, add_up(on_cpu(world))


def _refusal(world: Peer) -> str:
    try:
        on_cpu(world)
    except TransportError as error:
        return str(error)
    return "nothing"


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
    return values(model)


def differences(world: Peer, strategies: list[str], folder: str) -> list[float]:
    """Return how far parameters are apart with lanes on the device and with the host's, for each strategy."""
    far = []
    for number, strategy in enumerate(strategies):
        host = train(strategy, "host", world)
        found = train(strategy, "gloo", world, save=f"{folder}/{number}")
        far.append(_apart(found, host))
    return far


def with_faults(world: Peer, strategies: list[str]) -> bool:
    """Return whether ranks whose operations are held back train what they do without."""
    faults = Faults(seed=5, delay_s=(0.0, 0.003), reorder=0.5)
    return all(
        train(strategy, "gloo", faults.wrap(world)) == train(strategy, "gloo", world)
        for strategy in strategies
    )


def values(model: nn.Module) -> list[float]:
    """Return a model's parameters."""
    return [each for parameter in model.parameters() for each in parameter.detach().flatten().tolist()]


def unusual(feature: str, strategy: str, lanes: Any, peer: Peer) -> list[float]:
    """Return what ranks have trained that use a feature of sessions, and what the session counts."""
    recipe, *overrides = strategy.split(";")
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + peer.rank), enabled=feature == "scaler")
    generator = torch.Generator().manual_seed(peer.rank)
    batches = torch.randn(STEPS + (peer.rank if feature == "uneven" else 0), 4, 5, generator=generator)
    if feature in ("nan", "scaler") and peer.rank == peer.size - 1:
        batches[2] = float("nan")
    told: list[float] = []
    on_nonfinite: Any = "skip" if feature == "nan" else "error"
    with hocket.attach(
        model,
        optimizer,
        hocket.compose(recipe, *overrides),
        lanes=lanes,
        peer=peer,
        on_nonfinite=on_nonfinite,
    ) as session:
        for number, x in enumerate(session.data(batches)):
            optimizer.zero_grad()
            if feature == "accumulation":
                with session.accumulate():
                    model(x[:2], [0, 2]).square().mean().backward()
            scaler.scale(model(x, [number % 4, 3]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if feature == "consensus":
                with session.consensus():
                    told += values(model)
                told.append(session.consensus_distance())
        session.settle()
        told += [session.skipped_steps, session.step]
    return told + values(model)


def features(world: Peer, names: list[str], strategies: list[str]) -> list[list[float]]:
    """Return how far what is trained is apart on lanes on the device and on the host's, by feature and strategy."""
    return [
        [
            _apart(*(unusual(name, strategy, lanes, world) for lanes in ("gloo", "host")))
            for strategy in strategies
        ]
        for name in names
    ]


def _apart(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def resumed(world: Peer, strategies: list[str], folder: str) -> list[float]:
    """Return how far runs that go on from a checkpoint, on either lanes, are from one that was not interrupted."""
    far = []
    for number, strategy in enumerate(strategies):
        expected = _parts(strategy, "host", world, None)
        for before, after in (("gloo", "gloo"), ("gloo", "host"), ("host", "gloo")):
            found = _parts(strategy, before, world, (f"{folder}/{number} {before} {after}", after))
            far.append(_apart(found, expected))
    return far


def _parts(strategy: str, lanes: Any, world: Peer, further: tuple[str, Any] | None) -> list[float]:
    """Train, and where a folder is given go on from there in the middle with another model, on other lanes."""
    recipe, *overrides = strategy.split(";")
    batches = torch.randn(STEPS, 4, 5, generator=torch.Generator().manual_seed(world.rank))
    folder, then = further or ("", lanes)
    for start, on in ((0, lanes), (STEPS // 2, then)):
        if start == 0 or folder:
            model = Branches()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if start == 0 else 9.0, momentum=0.9)
            session = hocket.attach(
                model, optimizer, hocket.compose(recipe, *overrides), lanes=on, peer=world
            )
        if start and folder:
            session.load(folder)
        for x in batches[start : start + STEPS // 2]:
            optimizer.zero_grad()
            model(x, [0, 3]).square().mean().backward()
            optimizer.step()
        if start == 0 and folder:
            session.save(folder)
            session.close()
    session.close()
    return values(model)


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
