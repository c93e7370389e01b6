"""Operations that a process group of torch has begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hocket.errors import TransportError
from hocket.transport.device.groups import FOR_EVER, DeviceGroup
from hocket.transport.device.waiting import explain, start_aside, wait_for_torch
from hocket.transport.request import Request

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work


class DeviceOperation(Request):
    """An operation that a process group has begun.

    Args:
        group: the process group.
        lane: the lane's name, for messages.
        what: the operation, for messages.
        begin: begins it, and returns torch's own futures of it.
        buffers: its buffers, kept alive until it is done.
        others: the ranks that it waits for; all ranks where None.
        polls: whether the backend shows that it is done without a wait: Gloo's messages do not.
    """

    def __init__(
        self,
        group: DeviceGroup,
        lane: str,
        what: str,
        begin: Callable[[], Sequence[Work]],
        buffers: Sequence[object],
        others: Sequence[int] | None = None,
        *,
        polls: bool = True,
    ) -> None:
        self._group, self._lane, self._what, self._polls = group, lane, what, polls
        rank, size = group.ranks.rank, group.ranks.size
        self._others = [r for r in range(size) if r != rank] if others is None else others
        self._buffers, self._over = buffers, False
        self._aside: Request | None = None
        try:
            self._works = begin()
        except RuntimeError as error:
            raise self._failed(error) from error

    def done(self) -> bool:
        if not self._over and self._is_there():
            self._end()
        return self._over

    def _is_there(self) -> bool:
        if self._aside is not None:
            return self._aside.done()
        return self._polls and all(work.is_completed() for work in self._works)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait on the CPU; on a device make the current stream wait, and return at once."""
        group = self._group
        if self._over:
            return
        if group.device != "cpu":
            self._end()
            return
        if not self._polls and self._aside is None:
            self._aside = start_aside(group.ranks, self._join)
        timeout_s = group.ranks.timeout_s if timeout_s is None else timeout_s
        try:
            wait_for_torch(group.ranks, self.done, timeout_s, self._lane, self._what, self._others)
        except TransportError:
            group.give_up()
            raise

    def _join(self) -> None:
        for work in self._works:
            if self._group.device == "cpu":
                work.wait(FOR_EVER)
            else:
                work.wait()

    def _end(self) -> None:
        try:
            if self._aside is None:
                self._join()
            else:
                self._aside.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._over = True
        if self._group.device == "cpu":
            self._buffers = ()

    def _failed(self, error: RuntimeError) -> TransportError:
        self._group.give_up()
        held = self._group.ranks
        where = f"rank {held.world_rank}: {self._lane} ({self._what})"
        failed = f"rank {held.world_rank}: {self._what} of {self._lane} failed"
        advice = "Check whether another rank has ended, and that all ranks have the same model and strategy"
        return explain(held, where, failed, error, advice)
