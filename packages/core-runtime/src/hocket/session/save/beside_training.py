"""Saves: their acts, carried out at once on all ranks, or beside training on a thread of each."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from hocket.checkpoint.collectively import collectively
from hocket.checkpoint.host_copies import HostCopies
from hocket.checkpoint.on_threads import OnThreads
from hocket.errors import CheckpointError
from hocket.transport.peer import Peer

_log = logging.getLogger("hocket")

#: The acts of a save. Every rank runs each of them; then the generator gets the results of all ranks. It returns the
#: checkpoint's directory.
Acts = Generator[Callable[[], Any], list[Any], Path]

# The steps between two looks are this part of the steps since the act has begun, at least 1 and at most the second.
_LOOK_EVERY_PART, _LOOK_EVERY_STEPS = 4, 64


def at_once(peer: Peer, acts: Acts) -> Path:
    """Carry out a save while training waits; collective.

    Raises:
        CheckpointError: on every rank, if an act failed on any.
    """
    results = None
    while True:
        try:
            act = next(acts) if results is None else acts.send(results)
        except StopIteration as ended:
            path: Path = ended.value
            return path
        try:
            results = collectively(peer, act)
        except BaseException as error:
            _undo(acts, error)
            raise


def _undo(acts: Acts, error: BaseException) -> None:
    """Undo what a save has done so far; a disk that takes nothing any more keeps what is left."""
    with contextlib.suppress(CheckpointError, OSError):
        acts.throw(error)


class BesideTraining:
    """The saves of a session that are written while it trains, one at a time; collective.

    Args:
        peer: all ranks.
    """

    def __init__(self, peer: Peer) -> None:
        # A group of its own: what it sends mixes with nothing, also where ranks are at different steps.
        group = peer.group(range(peer.size))
        assert group is not None  # this rank is one of all
        self._lane = group.lane("save")
        self.copies = HostCopies()
        self._acts: Acts | None = None
        self._act: OnThreads[Any] | None = None
        self._saved_at = self._begun = self._next_look = 0
        atexit.register(self._warn_of_end)

    def begin(self, acts: Acts, step: int) -> None:
        """Begin a save after `step`; there is no other under way.

        Raises:
            CheckpointError: on every rank: some state cannot be saved, or the folder cannot be written.
        """
        act = next(acts)
        self._acts, self._saved_at = acts, step
        self._start(act, step)

    def look(self, step: int) -> None:
        """Go on with the save under way, if there is one, after a step.

        Raises:
            CheckpointError: on every rank, after the same step: the save has failed.
        """
        if self._act is None or step < self._next_look:
            return
        if self._act.look():
            self._go_on(self._act, step)
        elif self._act.ended:
            self._next_look = step + 1
        else:
            self._plan_look(step)

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is complete.

        Raises:
            CheckpointError: on every rank: it has failed.
        """
        while self._act is not None:
            try:
                self._act.wait()
            except BaseException:  # of a rank that is not here any more
                self.drop()
                raise
            self._go_on(self._act, self._begun)

    def drop(self) -> None:
        """Leave a save under way as it is, incomplete: the other ranks may not be here."""
        atexit.unregister(self._warn_of_end)
        acts, self._acts, self._act = self._acts, None, None
        if acts is not None:
            with contextlib.suppress(OSError):
                acts.close()

    def _warn_of_end(self) -> None:
        """Warn of a save under way when the process ends, in a script that closes no session."""
        if self._acts is not None and self._lane.rank == 0:
            _log.warning(
                "this process ends while a thread still writes the checkpoint of step %d: call session.close(), which "
                "waits for it, or train within `with session:`",
                self._saved_at,
            )

    def close(self) -> None:
        """Close the lane, when no save is under way; collective."""
        self._lane.close()

    def _go_on(self, act: OnThreads[Any], step: int) -> None:
        """Begin the next act with the results of one that has ended."""
        assert self._acts is not None
        acts, self._acts, self._act = self._acts, None, None
        try:
            results = act.results()
        except BaseException as error:
            _undo(acts, error)
            if not isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {self._saved_at} was not written: its thread failed: {error}. The model in "
                "memory and the last complete checkpoint are unchanged: fix the cause, and save again"
            ) from error
        try:
            following = acts.send(results)
        except StopIteration:
            return
        self._acts = acts
        self._start(following, step)

    def _start(self, act: Callable[[], Any], step: int) -> None:
        self._act = OnThreads(self._lane, act)
        self._begun = step
        self._plan_look(step)

    def _plan_look(self, step: int) -> None:
        later = (step - self._begun) // _LOOK_EVERY_PART
        self._next_look = step + min(max(later, 1), _LOOK_EVERY_STEPS)
