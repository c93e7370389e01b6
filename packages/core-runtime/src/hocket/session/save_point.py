"""`session.save_on_signal`: ranks that are asked to end save together, after a step that all of them reach.

The request finds ranks in different steps, and some in a wait for others; those that no signal has reached look once a
second whether another was asked. Each tells the others, from a thread and so
at once, after which step it comes past its next save point; there it waits for what the others have told. The latest
of these points is one that nobody has passed: who has come to an earlier one goes on, and takes part in what the others
wait for. Nothing is sent, and nobody waits, before a request.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hocket.arrays import Array
from hocket.errors import CheckpointError, HocketError, TransportError
from hocket.transport.lane import Lane
from hocket.transport.preemption import Listener
from hocket.transport.request import Request

if TYPE_CHECKING:
    from hocket.session.core import SessionCore

__all__ = ["ENDED_STATUS", "SIGNALS", "SavePoint"]

_log = logging.getLogger("hocket")

#: The exit status of a rank that was asked to end, as of one that SIGTERM ends.
ENDED_STATUS = 143

# Seconds from the request until ranks give up: Kubernetes kills after 30.
_PATIENCE_S = 24.0
# What the others leave the rank that speaks for all.
_GRACE_S = 5.0
_POLL_S = 0.01


class SavePoint:
    """Where this rank's session saves when it is asked to end; collective.

    Args:
        session: whose steps are counted.
        save: calls `session.save`.
    """

    def __init__(self, session: SessionCore, save: Callable[[], Path]) -> None:
        self.session = session
        self._save_session = save
        #: The step after which this rank went on last.
        self.passed = session.step
        #: Whether the rank was asked to end.
        self.asked = False
        #: The step after which all save.
        self.target = 0
        self.error: HocketError | None = None
        self.agreed = threading.Event()
        self._hook = session.model.register_forward_pre_hook(self._reach_in_forward)
        #: Open once all ranks have come here.
        self.lane: Lane | None = None
        SIGNALS.watch(self)
        self.lane = session.peer.lane("signals")

    def reach(self) -> None:
        """Go on after a step; save and leave (SystemExit) if the ranks have agreed on this one."""
        step = self.session.step
        if step == self.passed:
            return  # within an accumulation
        self.passed = step
        if not self.asked:
            return
        self.agreed.wait()  # for `_give_up` at the longest
        if self.error is not None:
            raise self.error
        if step >= self.target:
            self._save()

    def _reach_in_forward(self, model: torch.nn.Module, _: object) -> None:
        """Do so before the next forward, in a loop that does not ask `session.data` for batches."""
        if model.training and torch.is_grad_enabled() and not self.session.epochs.under_way:
            self.reach()

    def _save(self) -> None:
        session = self.session
        try:
            path = self._save_session()
            told = f"saved after step {session.step} in {path}"
        except CheckpointError as error:
            told = f"not saved, and the last checkpoint stands: {error}"
        if session.rank == 0:
            print(f"hocket: asked to end: {told}; all ranks end", file=sys.stderr, flush=True)
        session.gather(None)  # before a rank ends, and so perhaps all
        SIGNALS.forget(self)
        raise SystemExit(ENDED_STATUS)

    def close(self, *, together: bool) -> None:
        """Heed no request any more; collective if `together`, else for a session that an error has left."""
        self._hook.remove()
        try:
            if together and self.session.size > 1:
                self._end_together()
        finally:
            SIGNALS.forget(self)

    def _end_together(self) -> None:
        """See to it that ranks that were asked to end find the others', which have come to the training's end."""
        if any(self.session.gather(self.asked)):
            SIGNALS.ask()
            self.agreed.wait()
        elif self.lane is not None:
            self.lane.close()


class ProcessSignals:
    """Requests to end, heard for the save points of this process's ranks: one, or those of all virtual ranks."""

    def __init__(self) -> None:
        self._points: list[SavePoint] = []
        self._listener: Listener | None = None
        self._closed = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear requests for virtual ranks: they are threads, and only the main one may set handlers."""
        listener = self._listener = Listener(self._heard)
        try:
            yield
        finally:
            self._listener = None
            self._closed.set()
            listener.close()

    def watch(self, point: SavePoint) -> None:
        """Tell a save point of requests from now on."""
        on_main = threading.current_thread() is threading.main_thread()
        if not self._points:
            self._closed.clear()
        self._points.append(point)
        if self._listener is None and on_main:
            self._listener = Listener(self._heard, self._asked_elsewhere)
        elif self._listener is None and point.session.rank == 0:
            _log.warning(
                "session.save_on_signal: signals are not heard here: only a process's main thread can heed them, and "
                "this is another one. Virtual ranks of `hocket run` do hear them"
            )

    def forget(self, point: SavePoint) -> None:
        """Tell a save point of no more requests."""
        if point in self._points:
            self._points.remove(point)
        if not self._points:
            self._closed.set()
            if self._listener is not None and threading.current_thread() is threading.main_thread():
                self._listener.close()
                self._listener = None

    def ask(self) -> None:
        """Do as if a signal had come."""
        if self._listener is not None:
            self._listener.request()

    def _asked_elsewhere(self) -> bool:
        return any(point.session.peer.status.is_asked_to_end() for point in list(self._points))

    def _heard(self, listener: Listener) -> None:
        """Agree on a step, on the listener's thread; end all ranks if they have not saved in time."""
        end_s = time.monotonic() + _PATIENCE_S
        while not self._all_here() and not listener.closed and time.monotonic() < end_s:
            time.sleep(_POLL_S)  # the session is being attached
        points = list(self._points)
        if not points:
            return
        points[0].session.peer.status.ask_to_end()
        for point in points:
            point.asked = True  # before `passed` is read: who writes that afterwards looks at this then
        target = max(point.passed for point in points) + 1
        missing: list[int] = []
        if not points[0].session.peer.threads.shares_process:
            try:
                target, missing = self._latest(points[0], target, end_s)
            except TransportError as error:
                points[0].error = error
        if not missing:
            for point in points:
                point.target = target
                point.agreed.set()
        if not self._closed.wait(max(0.0, end_s - time.monotonic())):
            _give_up(points[0], target, missing)

    def _all_here(self) -> bool:
        if not self._points:
            return False
        peer = self._points[0].session.peer
        if not peer.threads.shares_process:
            return self._points[0].lane is not None
        return len(self._points) == peer.size

    def _latest(self, point: SavePoint, own: int, end_s: float) -> tuple[int, list[int]]:
        """Return the latest of all ranks' next save points, and the ranks that have not told theirs in time."""
        session, lane = point.session, point.lane
        others = [rank for rank in range(session.size) if rank != session.rank]
        if lane is None:  # some rank has not come so far
            return own, others
        told: Array = np.full(session.size, own, dtype=np.int64)
        mine = told[session.rank : session.rank + 1].copy()
        receives = {rank: lane.irecv(told[rank : rank + 1], rank, 0) for rank in others}
        sends: Sequence[Request] = [lane.isend(mine, rank, 0) for rank in others]
        while time.monotonic() < end_s and not self._closed.is_set():
            if all([request.done() for request in (*receives.values(), *sends)]):  # noqa: C419 (each look moves one on)
                break
            time.sleep(_POLL_S)
        return int(told.max()), [rank for rank, receive in receives.items() if not receive.done()]


#: Of this process.
SIGNALS = ProcessSignals()


def _give_up(point: SavePoint, target: int, missing: Sequence[int]) -> None:
    """End all ranks without a save."""
    session = point.session
    if any(rank not in missing for rank in range(session.rank)):
        time.sleep(_GRACE_S)
    if missing:
        ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        why = f"{ranks} did not hear of it: a signal to one rank is told to those that reach its host"
    else:
        why = f"step {target} was not over and saved"
    message = (
        f"hocket: asked to end: within {_PATIENCE_S:.0f} s {why}; the last checkpoint stands; all ranks end"
    )
    if session.peer.threads.shares_process:
        print(message, file=sys.stderr, flush=True)
        os._exit(ENDED_STATUS)
    session.peer.abort(message, ENDED_STATUS)
