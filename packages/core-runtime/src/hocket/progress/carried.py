"""Requests that another thread advances than the one that started them.

Source: GossipGraD (Daily et al. 2018), sec. 5.2: the training thread puts what is to be communicated into a queue, from
which a communication thread takes it.
"""

from __future__ import annotations

from typing import Any

from hocket.progress.driver import Driver
from hocket.progress.run import Waiter
from hocket.transport.request import Request

__all__ = ["CarriedRequest"]


class CarriedRequest(Request):
    """What the training thread holds of a request that a driver looks at.

    Only the driving thread touches the request itself: MPI lets no two threads look at one at once.

    Args:
        held: started, and nobody's but the driver's from now on.
        driver: whose thread it is handed to.
        waiter: how the training thread waits for the driver.
        name: stands in messages, for instance `gradients.0[3]`.
    """

    __slots__ = ("_driver", "_name", "_over", "_waiter", "held")

    def __init__(self, held: Request, driver: Driver, waiter: Waiter, name: str) -> None:
        self.held = held
        self._driver = driver
        self._waiter = waiter
        self._name = name
        self._over = False
        driver.carry(self)

    def advance(self) -> bool:
        """Look at the request, in the driving thread, and return whether it is done."""
        self._over = self.held.done()
        return self._over

    def done(self) -> bool:
        self._driver.check()
        return self._over

    def wait(self, timeout_s: float | None = None) -> Any:
        if not self.done():
            peer = self._driver.peer
            peer.status.note_waiting("the progress thread", self._name)
            self._waiter.wait_until(lambda: self._over, lambda: f"the messages of {self._name}", timeout_s)
            peer.status.note_computing()
            self._driver.check()
        return self.held.result

    @property
    def result(self) -> Any:
        return self.held.result
