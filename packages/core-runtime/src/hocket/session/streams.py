"""Cursors over samples that travel between ranks: no batch is read before the previous one has been used.

A stream saves its own position. What it reads from its loader depends on the random states at the beginning, which
are kept, and put in force again before a resumed stream reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket import randomness
from hocket.randomness import RandomState
from hocket.session.loader import END, Cursor, LoaderReading, own_generators
from hocket.strategy.samples import SampleShuffle, SampleStream
from hocket.transport.peer import Peer

__all__ = ["StreamCursor", "StreamedSamples"]

#: What comes next has not been asked for.
_UNREAD: Any = object()


class StreamCursor(Cursor):
    """A position in one pass over a stream, which reads `following` when it is looked at.

    Nothing says how many samples a batch has that came from another rank, so `weight` stays None.

    Args:
        stream: begins an epoch now; collective.
        reading: in force whenever the stream is read.
        saved: what `state_dict` returned, to continue.
    """

    def __init__(
        self, stream: SampleStream, reading: LoaderReading, saved: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reading)
        self._stream = stream
        if saved is not None:
            stream.load_state_dict(saved["before_newest"])
        with reading:
            self._batches = iter(stream)
        self._before_newest = stream.state_dict()
        self._following: Any = _UNREAD
        self.first = self.following
        if saved is not None:
            self.num_steps, self.num_read = saved["num_steps"], saved["num_read"]
            if self.num_read:
                self._hand_out()

    @property
    def following(self) -> Any:
        """The next batch; END where there is none. Looked at only when the last one has been used."""
        if self._following is _UNREAD:
            before = self._stream.state_dict()
            with self.reading:
                self._following = next(self._batches, END)
            if self._following is not END:
                self.num_read += 1
                self._before_newest = before
        return self._following

    def _hand_out(self) -> None:
        self.last, self._following = self._following, _UNREAD

    def state_dict(self) -> dict[str, object]:
        return {
            "num_steps": self.num_steps,
            "num_read": self.num_read,
            "before_newest": self._before_newest,
        }


class StreamedSamples:
    """The samples of a session that travel between ranks.

    Args:
        exchange: moves the samples.
        loader: this rank's batches; read as the exchange does.
        peer: all ranks; collective.
        rank, size: which share of the samples the loader reads, and of how many.
    """

    def __init__(self, exchange: SampleShuffle, loader: object, peer: Peer, rank: int, size: int) -> None:
        self.loader = loader
        # A loader is read in its first epoch, and again, as it was then, when a run is resumed.
        self._reading = LoaderReading(rank, size, epoch=0)
        self._stream = exchange.wrap(loader, peer)
        self._start: RandomState | None = None
        self._generators: list[torch.Tensor] = []

    def __len__(self) -> int:
        with self._reading:
            return len(self._stream)

    def begin(self) -> StreamCursor:
        """Begin a pass."""
        if self._start is None:
            self._start = randomness.read(cuda=True)
            self._generators = [generator.get_state() for generator in own_generators(self.loader)]
        return StreamCursor(self._stream, self._reading)

    def resume(
        self, state: Mapping[str, Any], current: Mapping[str, Any] | None, now: RandomState
    ) -> StreamCursor:
        """Continue a pass, or begin the next one.

        Args:
            state: what `state_dict` returned.
            current: what that of the pass under way returned; None where none was.
            now: the random states that training goes on from.
        """
        self._start, self._generators = randomness.from_plain(state["start"]), state["generators"]
        randomness.write(self._start)
        for generator, saved in zip(own_generators(self.loader), self._generators, strict=True):
            generator.set_state(saved)
        if current is None:
            self._stream.load_state_dict(state["stream"])
            with self._reading:
                for _ in self._stream:
                    pass  # at an epoch's end, or left early
        resumed = StreamCursor(self._stream, self._reading, current)
        randomness.write(now)
        return resumed

    def state_dict(self) -> dict[str, object]:
        """Return what is needed to go on, beside the state of a pass under way."""
        assert self._start is not None
        return {
            "stream": self._stream.state_dict(),
            "start": randomness.to_plain(self._start),
            "generators": self._generators,
        }

    def close(self) -> None:
        """Give the stream back; collective."""
        self._stream.close()
