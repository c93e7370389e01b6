"""`session.data`: batches for ranks that have different numbers of them.

Every rank gets as many batches as the rank with most. A rank that is out of data gets its last batch again, with weight
0: it runs the same code as the others, takes part in every exchange, contributes nothing to any mean, and steps its
optimizer with the others' gradients (or, where gradients stay local, not at all). So clipping, schedulers, scalers and
EMA copies stay in step on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from hocket.errors import PeerLostError, UserError
from hocket.messages import pack, unpack
from hocket.plain import Batch
from hocket.session.data.loader import (
    END,
    Cursor,
    check_facts,
    fingerprint,
    length_of,
    warn_of_samples,
    warn_of_shares,
)
from hocket.session.data.reading import LoaderReading
from hocket.session.engine_session import EngineSession
from hocket.session.save.save_folders import refuse_later
from hocket.session.step.other_sessions import only_evaluates
from hocket.transport.peer import gather
from hocket.transport.request import Request

_log = logging.getLogger("hocket")

_TWO_PASSES = (
    "another pass over session.data has begun within this one (zip of two session.data, or a loop within a "
    "loop). Each pass counts the session's steps, so they would count twice. Read both loaders in one "
    "pass: `for a, b in session.data(zip(first_loader, second_loader))`, with the zip made anew for each "
    "pass"
)


class SessionData:
    """A loader with equally many batches on all ranks; each iteration is collective.

    Args:
        session: takes part in the exchanges of batches that were skipped.
        loader: any iterable of batches; with a length on every rank, the ranks agree when an iteration begins and after
            that many batches, else before each batch. It is read to its end.
        weight: returns a batch's weight in the step's means, relative to 1; where None the weight of `hocket.loader`,
            and 1 for other loaders.
        same_batches: whether ranks are meant to read the same batches.
    """

    def __init__(
        self,
        session: EngineSession,
        loader: Iterable[Batch],
        weight: Callable[[Batch], float] | None,
        same_batches: bool = False,
    ) -> None:
        self._session = session
        self._loader = loader
        self._weight = weight
        self._same_batches = same_batches
        self._streamed = session.samples()
        self._borrowed: Batch = None

    def __len__(self) -> int:
        """Return the loader's number of batches, for the share of the samples that this rank reads.

        Raises:
            TypeError: the loader has no length.
        """
        if self._streamed is not None:
            return self._streamed.length(self._loader, self._session.epochs.ended)
        with LoaderReading(self._session.data_rank, self._session.data_size, self._session.epochs.ended):
            return length_of(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return the loader's own attribute, as for `len(loader.dataset)` in a line of progress."""
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):  # the session reads ahead
            raise AttributeError(f"session.data has no attribute {name!r}: ask the loader that it reads")
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        self._session.begin_collective("the next pass over session.data")
        self._session.epochs.supersede(unused=self._session.batch_unused)
        current = self._begin()
        early = True
        steps = self._common_steps(current)
        try:
            for _ in steps:
                has_batch = current.advance()
                batch = self._borrowed if current.last is END else current.last
                self._session.begin_batch(self._weigh(batch, current) if has_batch else 0.0)
                try:
                    yield batch
                finally:
                    current.trained = current.trained or not self._session.looked_on
                if current.superseded:
                    raise UserError(_TWO_PASSES)
                self._session.end_batch()
                if self._session.save_point is not None:
                    self._session.save_point.reach()
            early = False
            self._warn_of_pass(current)
        finally:
            steps.close()
            self._session.epochs.end(
                current,
                early=early,
                counts=current.trained or current.num_steps == 0,
                unused=self._session.batch_unused,
            )
            if not current.superseded:  # else another pass is under way
                self._session.end_pass()

    def _begin(self) -> Cursor:
        session = self._session
        evaluates = only_evaluates(session.model)
        if not evaluates:
            refuse_later(session)
        if self._streamed is not None and not (
            session.evaluates and self._streamed.is_of_another(self._loader)
        ):
            return session.epochs.begin_streamed(self._streamed, self._loader)
        return session.epochs.begin(
            self._loader, session.data_rank, session.data_size, session.peer.status, evaluates=evaluates
        )

    def _weigh(self, batch: Batch, current: Cursor) -> float:
        """Return a batch's weight.

        Raises:
            UserError: the weight function has returned no finite number of 0 or more.
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
                f"rank {self._session.rank}, step {self._session.step}: weight={name} gave {given!r} for batch "
                f"{current.num_steps} of this pass over session.data: return a finite number, 0 or more, where 1 is "
                "the weight of a usual batch"
            )
        return weight

    def _warn_of_pass(self, current: Cursor) -> None:
        """Warn of an empty pass, and of batches that could not be weighed, at a pass's end."""
        if current.num_steps == 0:
            _log.warning(
                "rank %d: a pass over session.data gave no batch on any rank. An iterator (zip, map, a generator) "
                "can be read only once: create a new one for each pass",
                self._session.rank,
            )
        elif current.reading.unweighed and self._weight is None:
            _log.warning(
                "rank %d: the batches of hocket.loader differ in size, but a wrapper around the loader "
                "hides their sizes, so all batches counted the same: pass session.data(..., weight=...)",
                self._session.rank,
            )

    def _common_steps(self, current: Cursor) -> Generator[None]:
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
            if not self._session.goes_together:
                while current.following is not END:
                    yield
                return
            if not self._session.epochs.goes_on(peer, current):
                return
            self._warn_of_length(current, lengths[peer.rank])
        yield from self._steps_asked_for(current)

    def _steps_asked_for(self, current: Cursor) -> Generator[None]:
        """Yield for each step that any rank still has a batch for, as the ranks ask each other before it."""
        session = self._session
        send, received = np.zeros(2, dtype=np.int64), np.empty(2, dtype=np.int64)
        while True:
            send[0] = current.following is not END
            self._wait_for(lambda: session.control.iallreduce(send, received))
            have_more, have_left = received
            if have_more == 0:
                return
            if have_left and not session.goes_together:
                while current.following is not END:
                    yield
                return
            if have_left:
                session.epochs.goes_on(session.peer, current)  # raises, as they meet those that have left
            try:
                yield
            except GeneratorExit:
                # The others ask once more, and hear that this rank has left its loop; it waits for nobody here.
                if not session.state.ended:
                    with contextlib.suppress(PeerLostError):  # as one that has ended asks no more
                        session.control.iallreduce(np.array([0, 1]), np.empty(2, dtype=np.int64))
                raise

    def _warn_of_length(self, current: Cursor, length: int | None) -> None:
        if current.following is not END:
            _log.warning(
                "rank %d: the loader of session.data has more batches than its len(), %s. They are read, but the "
                "ranks ask each other before each of them, which takes time. Correct its __len__",
                self._session.rank,
                length,
            )

    def _wait_for(self, start: Callable[[], Request]) -> None:
        """Wait for a request before a batch, counted as waiting for an exchange."""
        now, counters = self._session.peer.clock.now, self._session.counters
        start_s = now()
        counters.note_start(start_s)
        try:
            start().wait()
        finally:
            end_s = now()
            counters.exposed_wait_s += end_s - start_s
            counters.note_end(end_s)

    def _lengths(self, current: Cursor) -> list[int | None]:
        """Return every rank's number of batches, None where unknown; lend a batch to ranks without one."""
        session, peer = self._session, self._session.peer
        has_any = current.num_read > 0
        try:
            length: int | None = len(self) if has_any else 0
        except TypeError:
            length = None
        if not session.epochs.believes_lengths:
            length = None
        compares = not (session.epochs.compared or self._same_batches)
        mark = fingerprint(current.first) if compares and current.first is not END else None
        gathered = gather(
            peer,
            [
                length,
                has_any,
                current.reading.facts,
                session.data_rank,
                mark,
                session.windows is not None and session.windows.adds_up,
            ],
            what="a pass over session.data",
        )
        lengths, having, facts, shares, marks, adding = zip(*gathered, strict=True)
        check_facts(facts)
        if session.windows is not None and any(adding):
            session.windows.in_use = True
        session.epochs.compared = True
        if peer.rank == 0:
            warn_of_samples(facts)
            warn_of_shares(list(zip(shares, marks, strict=True)))
        if any(having) and not all(having):
            self._borrow(having.index(True), current.first)
        current.first = END
        return list(lengths)

    def _borrow(self, lender: int, batch: Batch) -> None:
        """Take another rank's batch, for ranks that have none; collective."""
        peer, mine, refusal = self._session.peer, b"", ""
        if peer.rank == lender:
            try:
                mine = pack(batch)
            except UserError as error:
                refusal = str(error)
        # A byte before it says whether what follows is a batch.
        sent = peer.allgather_bytes(b"!" + refusal.encode() if refusal else b"=" + mine)[lender]
        if sent[:1] == b"!":
            raise UserError(
                "a rank without a batch in this pass over session.data cannot get a copy of the batch of rank "
                f"{lender}: {sent[1:].decode()}"
            )
        self._borrowed = unpack(sent[1:])
