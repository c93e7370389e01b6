"""The transports that need no launcher, against the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hocket.testing.transport import TransportConformance
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import VirtualWorld, current_peer


class TestVirtual(TransportConformance):
    sizes = (1, 2, 3, 4, 7)

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return VirtualWorld(size).run(lambda: body(current_peer(), *args))


@pytest.mark.one_of_each
@pytest.mark.parametrize("seed", [1, 2, 3])
class TestVirtualInOtherInterleavings(TransportConformance):
    sizes = (3, 4)

    @pytest.fixture(autouse=True)
    def _use_seed(self, seed: int) -> None:
        self.seed = seed

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return VirtualWorld(size, seed=self.seed).run(lambda: body(current_peer(), *args))


class TestSingle(TransportConformance):
    sizes = (1,)

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return [body(SinglePeer(), *args)]
