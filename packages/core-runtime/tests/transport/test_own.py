"""Somebody's own transport needs the abstract methods of a peer and a lane, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hocket
from hocket.arrays import Array
from hocket.launch.joining import join
from hocket.testing.transport import TransportConformance
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request
from hocket.transport.virtual import VirtualWorld


class OwnLane(Lane):
    """What a stranger's lane does, here over a virtual one."""

    def __init__(self, held: Lane) -> None:
        self._held = held
        self.name, self.rank, self.size = held.name, held.rank, held.size

    def isend(self, data: Array, to: int, round: int) -> Request:
        return self._held.isend(data, to, round)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        return self._held.irecv(data, source, round)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        return self._held.iallreduce(send, receive)

    def ibroadcast(self, data: Array, root: int) -> Request:
        return self._held.ibroadcast(data, root)

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        return self._held.ireduce(send, receive, root)

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        return self._held.iallgather(send, receive)

    def ibarrier(self) -> Request:
        return self._held.ibarrier()

    def close(self) -> None:
        self._held.close()


class OwnPeer(Peer):
    """A stranger's peer: its clock, memory, threads and status are the contract's plain ones."""

    transport = "own"

    def __init__(self, held: Peer) -> None:
        super().__init__(held.rank, held.size)
        self._held = held

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        return OwnLane(self._held.lane(name))

    def group(self, ranks: Sequence[int]) -> Peer | None:
        group = self._held.group(ranks)
        return None if group is None else OwnPeer(group)

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        return self._held.allgather_bytes(data, timeout_s, what)

    def abort(self, message: str, code: int = 1) -> None:
        self._held.abort(message, code)

    def close(self) -> None:
        self.threads.check_ended()
        self._held.close()


class TestOwn(TransportConformance):
    sizes = (pytest.param(1, marks=pytest.mark.full), 3)

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return VirtualWorld(size).run(lambda: body(OwnPeer(join()), *args))


def test_nothing_but_abstract_methods_is_needed() -> None:
    for contract, own in ((Peer, OwnPeer), (Lane, OwnLane)):
        needed = contract.__abstractmethods__
        assert needed == {name for name in vars(own) if name[0] != "_"} - {"transport"}


def trained(recipe: str, wrap: Callable[[Peer], Peer]) -> list[list[float]]:
    def run() -> list[float]:
        held = join()
        assert held is not None
        torch.manual_seed(held.rank)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 5)
        with hocket.attach(model, optimizer, hocket.compose(recipe), peer=wrap(held)) as session:
            for batch in session.data([x] * 4):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            session.consensus()
        return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()

    return VirtualWorld(3).run(run)


def test_recipes_train_on_it_as_on_the_transport_that_it_holds() -> None:
    for recipe in ("agd", "sgp"):
        assert trained(recipe, OwnPeer) == trained(recipe, lambda held: held)
