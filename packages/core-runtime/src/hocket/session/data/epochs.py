"""The passes of a session over its loaders: the number that have ended, and the one under way."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

from hocket.errors import ExchangeTimeoutError, UserError
from hocket.plain import Batch, Tree
from hocket.randomness import RandomState
from hocket.session.data.loader import END, Cursor, LoaderCursor
from hocket.session.data.reading import LoaderReading
from hocket.session.data.streams import StreamCursor, StreamedSamples
from hocket.transport.peer import gather
from hocket.transport.status import Status, number_ranks

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

_log = logging.getLogger("hocket")

_TOGETHER = "All ranks must leave after the same batch: let them agree with session.gather"

#: Where ranks that leave a loop meet those that are in it.
_LOOP = "the loop over session.data"


class PassesState(TypedDict):
    """The section `passes` of a checkpoint: what a resumed run needs to go on with its passes.

    Attributes:
        ended: as `Epochs.ended`.
        current: the state of the pass under way; None where there is none.
        evaluates, trained: as `Cursor`'s, of that pass.
        streamed: the state of samples that travel; None where none do.
    """

    ended: int
    current: Tree | None
    evaluates: NotRequired[bool]
    trained: NotRequired[bool]
    streamed: Tree | None


class Epochs:
    """The passes of one session: the number that have ended, and the one under way.

    Attributes:
        ended: number of ended passes; in a loop over epochs the number, from 0, of the epoch under way or next.
        compared: whether the ranks have compared their first batches.
        believes_lengths: whether no pass has ended before its loaders' lengths said so.
    """

    def __init__(self) -> None:
        self.ended = 0
        self.compared = False
        self.believes_lengths = True
        #: After which batch this rank has left the last pass, and whether early; None if nobody needs to know.
        self._left: tuple[int, bool] | None = None
        self._current: Cursor | None = None
        self._streamed: StreamedSamples | None = None
        self._to_continue: tuple[PassesState, RandomState] | None = None
        #: What the current pass may have taken of it, and its number of batches before that pass.
        self._found: tuple[tuple[PassesState, RandomState] | None, int] = None, 0

    @property
    def under_way(self) -> bool:
        """Tell whether a pass has begun and not ended."""
        return self._current is not None

    def begin(
        self, loader: Iterable[Batch], rank: int, size: int, status: Status, *, evaluates: bool
    ) -> LoaderCursor:
        """Begin a pass, or continue the one that was loaded.

        Args:
            loader: any iterable of batches.
            rank, size: the number of this rank's share of the samples, and the number of shares.
            status: shows the other ranks that this one reads.
            evaluates: whether the model seems to be evaluated.
        """
        found = self._to_continue
        saved, now = self._take_loaded(evaluates)
        self._current = begun = LoaderCursor(
            loader, LoaderReading(rank, size, self.ended, status), saved and saved["current"], now
        )
        begun.evaluates = evaluates
        trained = begun.num_steps > 0
        begun.trained = trained if saved is None else saved.get("trained", trained)
        self._found = found, begun.num_steps
        return begun

    def _take_loaded(self, evaluates: bool) -> tuple[PassesState | None, RandomState | None]:
        """Take the saved state that a pass over a loader continues, if there is one.

        An evaluation leaves the state of a training pass, or of a stream, to the next training pass. A training pass
        drops the state of an evaluation.
        """
        if self._to_continue is None:
            return None, None
        saved, now = self._to_continue
        of_evaluation = _was_evaluation(saved)
        streams = saved["streamed"] is not None
        if (evaluates and not saved.get("evaluates", True)) or (streams and not of_evaluation):
            return None, None
        if streams:
            ended: PassesState = {**saved, "current": None}
            self._to_continue = ended, now
        else:
            self._to_continue = None
        return (None, None) if of_evaluation and not evaluates else (saved, now)

    def begin_streamed(self, samples: StreamedSamples, loader: Iterable[Batch]) -> StreamCursor:
        """Begin a pass over samples that travel, or continue the one that was loaded; collective."""
        self._streamed = samples
        if self._to_continue is None:
            begun = samples.begin(loader, self.ended)
        else:
            (saved, now), self._to_continue = self._to_continue, None
            assert saved["streamed"] is not None
            current = None if _was_evaluation(saved) else saved["current"]
            begun = samples.resume(loader, self.ended, saved["streamed"], current, now)
        begun.trained = begun.num_steps > 0
        self._current = begun
        return begun

    def note_trained(self) -> None:
        """Note that the current pass trains.

        Raises:
            UserError: the pass began like an evaluation, and so has not continued the saved pass.
        """
        if self._current is None or self._current.trained:
            return
        self._current.trained = True
        if self._current.evaluates and self._to_continue is not None:
            raise UserError(
                "this loop over session.data trains, but began with the model in eval mode, so it did not continue "
                "the checkpoint's pass over the data: call model.train() before the loop"
            )

    def supersede(self, *, unused: bool) -> None:
        """End the current pass, though its iterator may still exist; `unused` as for `end`."""
        if self._current is not None:
            self._current.superseded = True
            self.end(self._current, early=True, unused=unused)

    def end(self, ended: Cursor, *, early: bool = False, counts: bool = True, unused: bool = False) -> None:
        """Note that a pass is over. One that gave a single batch, for a look at it, leaves all as it was.

        Args:
            ended: the pass.
            early: whether its loop was left before its last batch.
            counts: whether it was a pass of training, not of evaluation alone.
            unused: whether nothing was done with its last batch.
        """
        if ended is self._current:
            found, began_at = self._found
            if early and unused and isinstance(ended, LoaderCursor) and ended.num_steps == began_at + 1:
                self._to_continue, counts = found, False
            self.ended += counts
            self._current = None
            self._left = (ended.num_steps, early)

    def leave_together(self, peer: Peer, call: str) -> None:
        """Check that all ranks left the last pass after the same batch, for the same call; collective.

        Args:
            peer: all ranks.
            call: the call that this rank makes next.

        Raises:
            ExchangeTimeoutError: this rank has left its loop, and others are still in theirs; says what they wait for.
            UserError: ranks have left it after different batches, or make different calls next.
        """
        left, self._left = self._left, None
        if left is None or peer.size == 1:
            return
        batch, early = left
        where = f"after batch {batch} of a pass over session.data"
        what = f"{_LOOP}: {'left' if early else 'ended'} the loop {where}"
        try:
            gathered = gather(peer, [batch, call], what=what)
        except ExchangeTimeoutError as error:
            if not early:
                raise
            raise ExchangeTimeoutError(
                f"rank {peer.rank} left the loop {where}, but other ranks are still in it. {_TOGETHER} ({error})"
            ) from error
        while _some_still_read(gathered):
            gathered = gather(peer, [batch, call], what=what)
        calls: dict[str, list[int]] = {}
        for rank, (_, other) in enumerate(gathered):
            calls.setdefault(other, []).append(rank)
        if len(calls) > 1:
            each = ", ".join(f"{other} on {number_ranks(ranks)}" for other, ranks in calls.items())
            raise UserError(
                f"after the loop over session.data, ranks make different calls: {each}. All ranks must make "
                "collective calls: move them out of `if session.is_main`, and keep only the use of the result inside"
            )

    def goes_on(self, peer: Peer, current: Cursor) -> bool:
        """Return whether any rank has more batches than its loader's length says; collective.

        Args:
            peer: all ranks; one that has left its loop early takes part by `leave_together`.
            current: the pass under way.

        Raises:
            UserError: other ranks have left the pass after another batch, or while there are more batches.
        """
        batch, more = current.num_steps, current.following is not END
        what = f"{_LOOP}: has ended batch {batch}, the last of a pass over session.data by its loader's len()"
        gathered = gather(peer, [batch, more, current.num_read], what=what)
        _some_still_read(gathered)
        longest = max((rank[2] for rank in gathered if isinstance(rank[1], bool)), default=batch)
        if longest < batch and all(isinstance(rank[1], bool) for rank in gathered):
            self.believes_lengths = False
            if peer.rank == 0:
                _log.warning(
                    "the loaders of session.data gave at most %d batches in this pass, but their len() is %d, so the "
                    "last steps trained nothing: correct __len__. Until then ranks ask each other before each batch, "
                    "which takes time",
                    longest,
                    batch,
                )
        return any(rank[1] is True for rank in gathered)

    def state_dict(self) -> PassesState:
        """Return the state that a resumed run needs."""
        current = self._current
        return {
            "ended": self.ended,
            "current": None if current is None else current.state_dict(),
            "evaluates": current is not None and current.evaluates,
            "trained": current is not None and current.trained,
            "streamed": None if self._streamed is None else self._streamed.state_dict(),
        }

    def load_state_dict(self, state: PassesState, now: RandomState) -> None:
        """Make the next pass the continuation of the one that was under way.

        Args:
            state: a result of `state_dict`.
            now: the random states of that moment.
        """
        self.ended = state["ended"]
        self._current = None
        nothing = state["current"] is None and state["streamed"] is None
        self._to_continue = None if nothing else (state, now)


def _was_evaluation(saved: PassesState) -> bool:
    """Return whether a saved pass evaluated the model and trained nothing."""
    return saved.get("evaluates", False) and not saved.get("trained", True)


def _some_still_read(gathered: Sequence[Sequence[object]]) -> bool:
    """Return whether some ranks still ask for a batch, though there is none, while others have left.

    Args:
        gathered: by rank, the number of its batch, and its next call, or whether it has another batch.

    Raises:
        UserError: ranks are after different batches, or some have left while there are more.
    """
    reading = [isinstance(rank[1], bool) for rank in gathered]
    wanted = any(rank[1] is True for rank in gathered) and not all(reading)
    if wanted or any(rank[0] != gathered[0][0] for rank in gathered):
        each = ", ".join(
            f"rank {number} {'goes on' if rank[1] is True else 'left'} after batch {rank[0]}"
            for number, rank in enumerate(gathered)
        )
        raise UserError(f"ranks left the loop over session.data after different batches: {each}. {_TOGETHER}")
    return any(reading)
