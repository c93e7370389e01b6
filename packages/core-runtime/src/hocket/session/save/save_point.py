"""The save point of `session.save_on_signal`: ranks that are asked to end save after a common step.

The request finds ranks in different steps, and some in a wait for others; ranks that no signal has reached check once a
second whether another was asked. Each rank sends the others, from a thread and so at once, the step of its next save
point; there it waits for the others' numbers. No rank has passed the latest of these points: a rank at an earlier one
continues, and takes part in the exchanges that the others wait for. Nothing is sent, and no rank waits, before a
request.
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
from hocket.launch.preemption import Listener
from hocket.transport.lane import Lane
from hocket.transport.request import Request

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession

_log = logging.getLogger("hocket")

#: The exit status of a rank that was asked to end, as of one that SIGTERM ends.
ENDED_STATUS = 143

# Seconds from the request until ranks give up: Kubernetes kills after 30.
_PATIENCE_S = 24.0
# What the others leave the rank that speaks for all.
_GRACE_S = 5.0
_POLL_S = 0.01


class SavePoint:
    """The point at which this rank's session saves when it is asked to end; collective.

    Args:
        session: the session whose steps are counted.
        save: saves all ranks' state, and returns where.

    Raises:
        HocketError: a session of this rank has one.
    """

    def __init__(self, session: EngineSession, save: Callable[[], Path | str]) -> None:
        SIGNALS.check_alone()
        self.session = session
        #: The thread that trains: a virtual rank's, or the main one.
        self.thread = threading.current_thread()
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
        #: Open once all ranks have made their save points.
        self.lane: Lane | None = None
        SIGNALS.watch(self)
        self.lane = session.peer.lane("signals")

    def reach(self) -> None:
        """Continue after a step, or save and exit (SystemExit) if the ranks have agreed on this one."""
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
        """Call `reach` before the next forward, in a loop without `session.data`."""
        if model.training and torch.is_grad_enabled() and not self.session.epochs.under_way:
            self.reach()

    def _save(self) -> None:
        session = self.session
        try:
            path = self._save_session()
            outcome = f"saved after step {session.step} in {path}"
        except CheckpointError as error:
            outcome = f"not saved, so the last checkpoint remains: {error}"
        if session.rank == 0:
            print(f"hocket: asked to end: {outcome}; all ranks end", file=sys.stderr, flush=True)
        session.gather(None)  # before a rank ends, and so perhaps all
        SIGNALS.forget(self)
        raise SystemExit(ENDED_STATUS)

    def close(self, *, together: bool) -> None:
        """Stop handling requests; collective if `together`, else for a session that an error has left."""
        self._hook.remove()
        try:
            if together and self.session.size > 1:
                self._end_together()
        finally:
            SIGNALS.forget(self)

    def _end_together(self) -> None:
        """Agree with ranks that were asked to end, when this rank has reached the end of training."""
        if any(self.session.gather(self.asked)):
            SIGNALS.ask()
            self.agreed.wait()
        elif self.lane is not None:
            self.lane.close()


class ProcessSignals:
    """The handlers of requests to end, for the save points of this process's ranks: one, or all virtual ones."""

    def __init__(self) -> None:
        self._points: list[SavePoint] = []
        self._listener: Listener | None = None
        self._closed = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle requests for virtual ranks, which are threads: only the main thread may set handlers."""
        listener = self._listener = Listener(self._heard)
        try:
            yield
        finally:
            self._listener = None
            self._closed.set()
            listener.close()

    def check_alone(self) -> None:
        """Raise HocketError if a session of this thread has a save point: steps of two have nothing in common."""
        self._points = [point for point in self._points if point.thread.is_alive()]
        if any(point.thread is threading.current_thread() for point in self._points):
            raise HocketError(
                "session.save_on_signal was already called, for this session or another of this process: call it once, "
                "with a function that saves all, or close the other session first"
            )

    def watch(self, point: SavePoint) -> None:
        """Notify a save point of requests from now on."""
        on_main = threading.current_thread() is threading.main_thread()
        if not self._points:
            self._closed.clear()
        self._points.append(point)
        if self._listener is None and on_main:
            self._listener = Listener(self._heard, self._asked_elsewhere)
        elif self._listener is None and point.session.rank == 0:
            _log.warning(
                "session.save_on_signal has no effect here, because only the main thread of a process receives "
                "signals: call it there, or start virtual ranks with `hocket run`"
            )

    def forget(self, point: SavePoint) -> None:
        """Stop notifying a save point."""
        if point in self._points:
            self._points.remove(point)
        if not self._points:
            self._closed.set()
            if self._listener is not None and threading.current_thread() is threading.main_thread():
                self._listener.close()
                self._listener = None

    def ask(self) -> None:
        """Act as on a signal."""
        if self._listener is not None:
            self._listener.request()

    def _asked_elsewhere(self) -> bool:
        return any(point.session.peer.status.is_asked_to_end() for point in list(self._points))

    def _heard(self, listener: Listener) -> None:
        """Agree on a step, on the listener's thread; end all ranks if they do not save in time."""
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
        """Return the latest of all ranks' next save points, and the ranks that did not answer in time."""
        session, lane = point.session, point.lane
        others = [rank for rank in range(session.size) if rank != session.rank]
        if lane is None:  # some rank has not made its save point
            return own, others
        steps: Array = np.full(session.size, own, dtype=np.int64)
        mine = steps[session.rank : session.rank + 1].copy()
        receives = {rank: lane.irecv(steps[rank : rank + 1], rank, 0) for rank in others}
        sends: Sequence[Request] = [lane.isend(mine, rank, 0) for rank in others]
        while time.monotonic() < end_s and not self._closed.is_set():
            if all([request.done() for request in (*receives.values(), *sends)]):  # noqa: C419 (each look moves one on)
                break
            time.sleep(_POLL_S)
        return int(steps.max()), [rank for rank, receive in receives.items() if not receive.done()]


#: Of this process.
SIGNALS = ProcessSignals()


def _give_up(point: SavePoint, target: int, missing: Sequence[int]) -> None:
    """End all ranks without a save."""
    session = point.session
    if any(rank not in missing for rank in range(session.rank)):
        time.sleep(_GRACE_S)
    if missing:
        ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        why = f"{ranks} did not hear of it (can they reach the host of the rank that got the signal?)"
    else:
        why = f"step {target} was not finished and saved"
    message = (
        f"hocket: asked to end, but {why} within {_PATIENCE_S:.0f} s: all ranks end without a new "
        "checkpoint; the last one remains"
    )
    if session.peer.threads.shares_process:
        print(message, file=sys.stderr, flush=True)
        os._exit(ENDED_STATUS)
    session.peer.abort(message, ENDED_STATUS)
