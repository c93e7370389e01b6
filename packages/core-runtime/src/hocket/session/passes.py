"""Passes over loaders, read one batch ahead, that another process can continue where this one was.

What a loader gives depends on what it draws: torch's DataLoader takes the seeds of its sampler and of its workers
from torch's global generator when a pass begins, and a dataset that is read in the training process draws for each
batch. So a pass remembers the random states at its start, and those before the newest batch was read. It is continued
by beginning it again from the former, leaving out what was handed out already, and reading the newest batch from the
latter; a loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, is put at its place
instead.

Beyond this, without a `state_dict`, are samplers that draw from the global generators batch by batch while workers
read ahead of training, and what persistent workers carry from one pass to the next; and, with one, a rank without any
data, which is lent another rank's next batch in place of its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hocket import randomness
from hocket.errors import CheckpointError, ExchangeTimeoutError, UserError
from hocket.randomness import RandomState
from hocket.session.reading import Reading
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.session.streaming import StreamedSamples, StreamPass
    from hocket.transport.peer import Peer

__all__ = ["END", "Pass", "Passes", "own_generators"]

#: What comes after the last batch.
END: Any = object()

_TOGETHER = (
    "Every step is all ranks': let them agree when to break or return, for instance by session.gather, or go on to the "
    "end, as session.data gives all ranks as many batches"
)


class Pass:
    """One pass over a loader.

    Args:
        loader: any iterable of batches.
        reading: is in force whenever the loader is read.
        saved: what `state_dict` returned, to continue.
        now: the random states that training goes on from, with `saved`.

    Attributes:
        last: the batch that was handed out last; END before the first.
        following: the next one; END where there is none.
        first: the first that this process has read, until somebody sets it to END.
        num_steps: how many have been handed out, repetitions of the last one included.
        num_read: how many the loader has given.
        weight: how much the last batch counts; None where its loader has not said so.
        superseded: whether another pass of the session has begun since.

    Raises:
        CheckpointError: the loader is not the one that was saved.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        reading: Reading,
        saved: Mapping[str, Any] | None = None,
        now: RandomState | None = None,
    ) -> None:
        self._loader: Any = loader
        self.reading = reading
        self.weight: float | None = None
        self.superseded = False
        self._weight_following: float | None = None
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.last: Any = END
        self.num_steps = self.num_read = 0
        self._loader_state: Any = None
        if saved is None:
            self._generators = [generator.get_state() for generator in own_generators(loader)]
            self._start = self._before_newest = randomness.read(cuda=True)
            with reading:
                self._batches = iter(loader)
            self.first = self.following = self._read()
        else:
            assert now is not None
            self._continue(saved)
            randomness.write(now)

    def advance(self) -> bool:
        """Hand out the next batch, in `last`; return False, and leave that as it is, where there is none."""
        self.num_steps += 1
        if self.following is END:
            return False
        self._hand_out()
        return True

    def _hand_out(self) -> None:
        self.weight = self._weight_following
        self.last, self.following = self.following, self._read()

    def _read(self) -> Any:
        before = randomness.read(self._before_newest, cuda=True)
        state = self._loader.state_dict() if self._has_state else None
        with self.reading:
            batch = next(self._batches, END)
        self._weight_following = self.reading.take_weight()
        if batch is not END:
            self.num_read += 1
            self._before_newest, self._loader_state = before, state
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue after the batch that was handed out last."""
        return {
            "num_steps": self.num_steps,
            "num_read": self.num_read,
            "start": randomness.to_plain(self._start),
            "before_newest": randomness.to_plain(self._before_newest),
            "generators": self._generators,
            "loader": self._loader_state,
        }

    def _continue(self, saved: Mapping[str, Any]) -> None:
        self._start, self._generators = randomness.from_plain(saved["start"]), saved["generators"]
        self._before_newest = randomness.from_plain(saved["before_newest"])
        num_read, self.num_steps = saved["num_read"], saved["num_steps"]
        jumps = num_read > 0 and self._has_state
        generators = own_generators(self._loader)
        if len(generators) != len(self._generators) or jumps != (saved["loader"] is not None):
            raise CheckpointError(
                "the loader has a state_dict or a generator of its own, and had none when the checkpoint was saved, or "
                "the other way round: continue with the same kind of loader"
            )
        randomness.write(self._start)
        for generator, state in zip(generators, self._generators, strict=True):
            generator.set_state(state)
        if jumps:
            self._loader.load_state_dict(saved["loader"])
        with self.reading:
            self._batches = iter(self._loader)
        self.first = END
        for number in range(0 if jumps else num_read - 1):
            with self.reading:
                batch = next(self._batches, END)
            self.reading.take_weight()
            self.first = batch if number == 0 else self.first
            if batch is END:
                raise CheckpointError(
                    f"the loader had given {num_read} batches when the checkpoint was saved, and has only {number} "
                    "now: continue with the same data and batch size"
                )
        randomness.write(self._before_newest)
        self.following = self._read()
        self.first = self.following if self.first is END else self.first
        self.num_read = num_read
        if self.num_steps >= num_read > 0:
            self._hand_out()


class Passes:
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
        self._current: Pass | StreamPass | None = None
        self._streamed: StreamedSamples | None = None
        self._to_continue: tuple[Mapping[str, Any], RandomState] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._current is not None

    def begin(self, loader: Iterable[Any], rank: int, size: int) -> Pass:
        """Begin a pass, or continue the one that was loaded.

        Args:
            loader: any iterable of batches.
            rank, size: which share of the samples is read, and of how many.
        """
        self._supersede()
        saved, now = self._to_continue or ({}, None)
        self._to_continue = None
        self._current = begun = Pass(loader, Reading(rank, size, self.ended), saved.get("current"), now)
        return begun

    def begin_streamed(self, samples: StreamedSamples) -> StreamPass:
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

    def end(self, ended: Pass | StreamPass, *, early: bool = False) -> None:
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


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader was given in place of the global one, each once."""
    owners = (loader, getattr(loader, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
