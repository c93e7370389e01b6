"""`session.data`: batches for ranks that have different numbers of them.

Every rank is given as many batches as the longest one has. A rank that is out of data is given its last batch
again, with weight 0: it runs the same code as the others, takes part in every exchange, contributes nothing to any
mean, and steps its optimizer with the others' gradients (or, where gradients stay local, not at all). So clipping,
schedulers, scalers and EMA copies stay in step on all ranks.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hocket.session.session import Session

__all__ = ["SessionData"]

_END = object()


class SessionData:
    """A loader, evened out over the ranks; each iteration is collective.

    Args:
        session: takes part in the exchanges of batches that were skipped.
        loader: any iterable of batches; with a length on every rank, the ranks agree once per iteration, else
            before each batch.
        weight: how much a batch counts in the step's means, relative to 1; one each where None.
    """

    def __init__(
        self, session: Session, loader: Iterable[Any], weight: Callable[[Any], float] | None
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
        batches = iter(self._loader)
        following = first = next(batches, _END)
        last: Any = _END
        for _ in self._common_steps(first, lambda: following is not _END):  # noqa: B023 (the current one)
            if following is not _END:
                last, following = following, next(batches, _END)
                weight = 1.0 if self._weight is None else float(self._weight(last))
            else:
                weight = 0.0
                if last is _END:
                    last = self._borrowed
            self._session.begin_batch(weight)
            yield last
            self._session.end_batch()

    def _common_steps(self, first: Any, has_batch: Callable[[], bool]) -> Iterator[None]:
        """Yield once for each step that any rank has a batch for."""
        peer = self._session.peer
        if peer.size == 1:
            while has_batch():
                yield
            return
        lengths = self._lengths(first)
        if None not in lengths:
            for _ in range(max(length for length in lengths if length is not None)):
                yield
            return
        send, received = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.int64)
        while True:
            send[0] = has_batch()
            self._session.control.iallreduce(send, received).wait()
            if received[0] == 0:
                return
            yield

    def _lengths(self, first: Any) -> list[int | None]:
        """Return every rank's number of batches, None where it is not known; lends a batch to who has none."""
        try:
            length: int | None = len(self) if first is not _END else 0
        except TypeError:
            length = None
        peer = self._session.peer
        told = [
            json.loads(data)
            for data in peer.allgather_bytes(json.dumps([length, first is not _END]).encode())
        ]
        having = [rank for rank, (_, has) in enumerate(told) if has]
        if having and len(having) < peer.size:
            self._borrow(having[0], first)
        return [length for length, _ in told]

    def _borrow(self, lender: int, first: Any) -> None:
        peer = self._session.peer
        # Between ranks of one job only: what is unpickled was pickled by the same program.
        mine = pickle.dumps(first) if peer.rank == lender else b""
        self._borrowed = pickle.loads(peer.allgather_bytes(mine)[lender])
