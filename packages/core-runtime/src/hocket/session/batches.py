"""`session.data`: batches for ranks that have different numbers of them.

Every rank is given as many batches as the longest one has. A rank that is out of data is given its last batch
again, with weight 0: it runs the same code as the others, takes part in every exchange, contributes nothing to any
mean, and steps its optimizer with the others' gradients (or, where gradients stay local, not at all). So clipping,
schedulers, scalers and EMA copies stay in step on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.session.passes import END, Pass
from hocket.session.streaming import StreamedSamples, StreamPass

if TYPE_CHECKING:
    from hocket.session.base import TrainingSession

__all__ = ["SessionData"]


class SessionData:
    """A loader, evened out over the ranks; each iteration is collective.

    Args:
        session: takes part in the exchanges of batches that were skipped.
        loader: any iterable of batches, or samples that travel; with a length on every rank, the ranks agree once
            per iteration, else before each batch.
        weight: how much a batch counts in the step's means, relative to 1; one each where None.
    """

    def __init__(
        self,
        session: TrainingSession,
        loader: Iterable[Any] | StreamedSamples,
        weight: Callable[[Any], float] | None,
    ) -> None:
        self._session = session
        self._loader = loader
        self._weight = weight
        self._borrowed: Any = None

    def __len__(self) -> int:
        """Return this rank's own number of batches.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        current = self._begin()
        try:
            for _ in self._common_steps(current):
                has_batch = current.advance()
                batch = self._borrowed if current.last is END else current.last
                weight = 0.0
                if has_batch:
                    weight = 1.0 if self._weight is None else float(self._weight(batch))
                self._session.begin_batch(weight)
                yield batch
                self._session.end_batch()
        finally:
            self._session.passes.end(current)

    def _begin(self) -> Pass | StreamPass:
        if isinstance(self._loader, StreamedSamples):
            return self._session.passes.begin_streamed(self._loader)
        return self._session.passes.begin(self._loader)

    def _common_steps(self, current: Pass | StreamPass) -> Iterator[None]:
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

    def _lengths(self, current: Pass | StreamPass) -> list[int | None]:
        """Return every rank's number of batches, None where it is not known; lends a batch to who has none."""
        has_any = current.num_read > 0
        try:
            length: int | None = len(self) if has_any else 0
        except TypeError:
            length = None
        peer = self._session.peer
        told = peer.gather([length, has_any])
        having = [rank for rank, (_, has) in enumerate(told) if has]
        if having and len(having) < peer.size:
            self._borrow(having[0], current.first)
        current.first = END
        return [length for length, _ in told]

    def _borrow(self, lender: int, batch: Any) -> None:
        peer = self._session.peer
        # Between ranks of one job only: what is unpickled was pickled by the same program.
        mine = pickle.dumps(batch) if peer.rank == lender else b""
        self._borrowed = pickle.loads(peer.allgather_bytes(mine)[lender])
