"""A wrapped peer keeps the contract, passes on what is set on it, and wraps what it opens as its class says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hocket.launch.joining import join
from hocket.testing.transport import TransportConformance
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import FunctionRequest, Request
from hocket.transport.virtual import VirtualWorld
from hocket.transport.wrapper import WrapperLane, WrapperPeer


def _wrapped(held: Request) -> Request:
    return FunctionRequest(held.done, held.wait, lambda: held.result, held.withdraw)


class _Lane(WrapperLane):
    def isend(self, *args: Any) -> Request:
        return _wrapped(super().isend(*args))

    def irecv(self, *args: Any) -> Request:
        return _wrapped(super().irecv(*args))

    def iallreduce(self, *args: Any) -> Request:
        return _wrapped(super().iallreduce(*args))


class _Peer(WrapperPeer):
    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> _Lane:
        return _Lane(held)


class TestWrapped(TransportConformance):
    sizes = (pytest.param(1, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full))

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return VirtualWorld(size).run(lambda: body(_Peer(join()), *args))


def test_every_method_of_a_peer_and_a_lane_is_passed_on() -> None:
    for contract, wrapper in ((Peer, WrapperPeer), (Lane, WrapperLane)):
        public = {
            name
            for name, value in vars(contract).items()
            if name[0] != "_" and (callable(value) or isinstance(value, property))
        }
        assert public <= set(vars(wrapper))


def test_the_parts_of_a_peer_are_those_of_the_one_it_holds() -> None:
    def body() -> bool:
        held = join()
        assert held is not None
        peer = _Peer(held)
        return all(
            getattr(peer, part) is getattr(held, part) for part in ("clock", "memory", "threads", "status")
        )

    assert VirtualWorld(2).run(body) == [True] * 2


def test_a_timeout_that_is_set_on_a_wrapper_counts_where_it_waits() -> None:
    def body() -> tuple[float, float]:
        held = join()
        assert held is not None
        outer = _Peer(_Peer(held))
        outer.timeout_s = 7.0
        return held.timeout_s, outer.timeout_s

    assert VirtualWorld(2).run(body) == [(7.0, 7.0)] * 2


def test_groups_are_wrapped_with_their_ranks() -> None:
    class Numbered(WrapperPeer):
        def __init__(self, held: Peer, ranks: Sequence[int]) -> None:
            super().__init__(held)
            self.ranks = list(ranks)

        def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
            return Numbered(held, [self.ranks[rank] for rank in ranks])

    def body() -> list[int] | None:
        held = join()
        assert held is not None
        peer = Numbered(held, range(held.size))
        group = peer.group([3, 2, 1])
        inner = group.group([2, 0]) if group is not None else None
        return inner.ranks if isinstance(inner, Numbered) else None

    assert VirtualWorld(4).run(body) == [None, [1, 3], None, [1, 3]]
