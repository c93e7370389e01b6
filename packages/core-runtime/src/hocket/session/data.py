"""`session.data`: batches for ranks that have different numbers of them.

Every rank is given as many batches as the longest one has. A rank that is out of data is given its last batch
again, with weight 0: it runs the same code as the others, takes part in every exchange, contributes nothing to any
mean, and steps its optimizer with the others' gradients (or, where gradients stay local, not at all). So clipping,
schedulers, scalers and EMA copies stay in step on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.errors import ExchangeTimeoutError, UserError
from hocket.messages import pack, unpack
from hocket.randomness import RandomState
from hocket.session.loader import (
    END,
    Cursor,
    LoaderCursor,
    LoaderReading,
    check_facts,
    fingerprint,
    warn_of_shares,
)
from hocket.session.streams import StreamCursor, StreamedSamples
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.session.api import TrainingSession
    from hocket.transport.peer import Peer

__all__ = ["Epochs", "SessionData"]

_log = logging.getLogger("hocket")

_TWO_PASSES = (
    "another pass over session.data has begun within this one (zip of two session.data, or a loop within a loop), and "
    "each counts the session's steps. Read both loaders in one pass: "
    "`for a, b in session.data(zip(first_loader, second_loader))`, with the zip made anew for each pass"
)


_TOGETHER = (
    "Every step is all ranks': let them agree when to break or return, for instance by session.gather, or go on to the "
    "end, as session.data gives all ranks as many batches"
)


class Epochs:
    """The passes of one session: how many have ended, and which one is under way.

    Attributes:
        ended: how many; in a loop over epochs the number, from 0, of the epoch under way or about to begin.
        compared: whether the ranks have compared their first batches.
    """

    def __init__(self) -> None:
        self.ended = 0
        self.compared = False
        #: After which batch this rank has left the last pass, and whether early; None if nobody needs to know.
        self._left: tuple[int, bool] | None = None
        self._current: Cursor | None = None
        self._streamed: StreamedSamples | None = None
        self._to_continue: tuple[Mapping[str, Any], RandomState] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._current is not None

    def begin(self, loader: Iterable[Any], rank: int, size: int) -> LoaderCursor:
        """Begin a pass, or continue the one that was loaded.

        Args:
            loader: any iterable of batches.
            rank, size: which share of the samples is read, and of how many.
        """
        self._supersede()
        saved, now = self._to_continue or ({}, None)
        self._to_continue = None
        self._current = begun = LoaderCursor(
            loader, LoaderReading(rank, size, self.ended), saved.get("current"), now
        )
        return begun

    def begin_streamed(self, samples: StreamedSamples) -> StreamCursor:
        """Begin a pass over samples that travel, or continue the one that was loaded; collective."""
        self._supersede()
        self._streamed = samples
        if self._to_continue is None:
            begun = samples.begin()
        else:
            (saved, now), self._to_continue = self._to_continue, None
            begun = samples.resume(saved["streamed"], saved["current"], now)
        self._current = begun
        return begun

    def _supersede(self) -> None:
        """Count a pass as ended whose iterator somebody still holds."""
        if self._current is not None:
            self._current.superseded = True
            self.end(self._current, early=True)

    def end(self, ended: Cursor, *, early: bool = False) -> None:
        """Take note that a pass is over.

        Args:
            ended: which one.
            early: whether its loop was left before its last batch.
        """
        if ended is self._current:
            self.ended += 1
            self._current = None
            self._left = (ended.num_steps, early)

    def meet(self, peer: Peer) -> None:
        """Find out that all ranks have left the last pass after the same batch; collective.

        Raises:
            ExchangeTimeoutError: this one has left its loop, and others go on with theirs; tells what they do.
            UserError: ranks have left it after different batches.
        """
        left, self._left = self._left, None
        if left is None or peer.size == 1:
            return
        batch, early = left
        where = f"after batch {batch} of a pass over session.data"
        try:
            told = gather(peer, batch, what=f"{'left' if early else 'ended'} the loop {where}")
        except ExchangeTimeoutError as error:
            if not early:
                raise
            raise ExchangeTimeoutError(
                f"rank {peer.rank} left the loop {where}, and others are still in it: {error}. {_TOGETHER}"
            ) from error
        if any(other != batch for other in told):
            each = ", ".join(f"rank {rank} after batch {other}" for rank, other in enumerate(told))
            raise UserError(
                f"ranks left the loop over session.data after different batches: {each}. {_TOGETHER}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on."""
        return {
            "ended": self.ended,
            "current": self._current and self._current.state_dict(),
            "streamed": None if self._streamed is None else self._streamed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], now: RandomState) -> None:
        """Make the next pass the continuation of the one that was under way.

        Args:
            state: what `state_dict` returned.
            now: the random states of that moment.
        """
        self.ended = state["ended"]
        self._current = None
        nothing = state["current"] is None and state["streamed"] is None
        self._to_continue = None if nothing else (state, now)


class SessionData:
    """A loader, evened out over the ranks; each iteration is collective.

    Args:
        session: takes part in the exchanges of batches that were skipped.
        loader: any iterable of batches, or samples that travel; with a length on every rank, the ranks agree once
            per iteration, else before each batch.
        weight: how much a batch counts in the step's means, relative to 1; where None as the loader says, if it is
            hocket's, and else 1.
        same_batches: whether ranks are meant to read the same batches.
    """

    def __init__(
        self,
        session: TrainingSession,
        loader: Iterable[Any] | StreamedSamples,
        weight: Callable[[Any], float] | None,
        same_batches: bool = False,
    ) -> None:
        self._session = session
        self._loader = loader
        self._weight = weight
        self._same_batches = same_batches
        self._borrowed: Any = None

    def __len__(self) -> int:
        """Return the loader's number of batches, for the share of the samples that this rank reads.

        Raises:
            TypeError: the loader has no length.
        """
        with LoaderReading(self._session.data_rank, self._session.data_size, self._session.epochs.ended):
            return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._session.meet()
        current = self._begin()
        early = True
        try:
            for _ in self._common_steps(current):
                has_batch = current.advance()
                batch = self._borrowed if current.last is END else current.last
                self._session.begin_batch(self._weigh(batch, current) if has_batch else 0.0)
                yield batch
                if current.superseded:
                    raise UserError(_TWO_PASSES)
                self._session.end_batch()
                if self._session.save_point is not None:
                    self._session.save_point.reach()
            early = False
            self._tell(current)
        finally:
            self._session.epochs.end(current, early=early)
            if not current.superseded:  # else another pass is under way
                self._session.end_pass()

    def _begin(self) -> Cursor:
        session = self._session
        if isinstance(self._loader, StreamedSamples):
            return session.epochs.begin_streamed(self._loader)
        return session.epochs.begin(self._loader, session.data_rank, session.data_size)

    def _weigh(self, batch: Any, current: Cursor) -> float:
        """Return how much a batch counts.

        Raises:
            UserError: nobody can compute with what the weight function has returned.
        """
        if self._weight is None:
            return 1.0 if current.weight is None else current.weight
        given = self._weight(batch)
        try:
            weight = float(given)
        except (TypeError, ValueError, RuntimeError):
            weight = math.nan
        if not 0 <= weight < math.inf:
            name = getattr(self._weight, "__qualname__", repr(self._weight))
            raise UserError(
                f"rank {self._session.rank}: the weight of batch {current.num_steps} of this pass over session.data, "
                f"at step {self._session.step}, is {given!r}, which weight={name} returned: let it return how much the "
                "batch counts relative to 1, a finite number, 0 or more"
            )
        return weight

    def _tell(self, current: Cursor) -> None:
        """Say what was odd in a pass that has come to its end."""
        if current.num_steps == 0:
            _log.warning(
                "rank %d: a pass over session.data gave no batch on any rank. An iterator (zip, map, a generator) can "
                "be read once: make it anew for each pass",
                self._session.rank,
            )
        elif current.reading.unweighed and self._weight is None:
            _log.warning(
                "rank %d: the batches of hocket.loader differ in size, and were read through an iterable that hides "
                "which is which, so that each counted the same: give session.data(..., weight=...)",
                self._session.rank,
            )

    def _common_steps(self, current: Cursor) -> Iterator[None]:
        """Yield once for each step that any rank still has a batch for."""
        peer = self._session.peer
        if peer.size == 1:
            while current.following is not END:
                yield
            return
        lengths = self._lengths(current)
        if None not in lengths:
            for _ in range(current.num_steps, max(length for length in lengths if length is not None)):
                yield
            return
        send, received = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.int64)
        while True:
            send[0] = current.following is not END
            self._session.control.iallreduce(send, received).wait()
            if received[0] == 0:
                return
            yield

    def _lengths(self, current: Cursor) -> list[int | None]:
        """Return every rank's number of batches, None where it is not known; lends a batch to who has none."""
        session, peer = self._session, self._session.peer
        has_any = current.num_read > 0
        try:
            length: int | None = len(self) if has_any else 0
        except TypeError:
            length = None
        compares = not (session.epochs.compared or self._same_batches)
        mark = fingerprint(current.first) if compares and current.first is not END else None
        told = gather(peer, [length, has_any, current.reading.facts, session.data_rank, mark])
        lengths, having, facts, shares, marks = zip(*told, strict=True)
        check_facts(facts)
        session.epochs.compared = True
        if peer.rank == 0:
            warn_of_shares(list(zip(shares, marks, strict=True)))
        if any(having) and not all(having):
            self._borrow(having.index(True), current.first)
        current.first = END
        return list(lengths)

    def _borrow(self, lender: int, batch: Any) -> None:
        """Take another rank's batch for one's own, as a rank does that has none; collective."""
        peer, mine, refusal = self._session.peer, b"", ""
        if peer.rank == lender:
            try:
                mine = pack(batch)
            except UserError as error:
                refusal = str(error)
        # A byte before it says whether what follows is a batch.
        told = peer.allgather_bytes(b"!" + refusal.encode() if refusal else b"=" + mine)[lender]
        if told[:1] == b"!":
            raise UserError(
                "a rank has no batch of its own in this pass over session.data, and cannot be lent the one of rank "
                f"{lender}: {told[1:].decode()}"
            )
        self._borrowed = unpack(told[1:])
