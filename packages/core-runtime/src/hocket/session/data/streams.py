"""Cursors over samples that travel between ranks: no batch is read before the previous one has been used.

A stream saves its own position. Its loader's batches depend on the random states at the beginning, which are saved, and
restored before a resumed stream reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hocket import randomness
from hocket.plain import Batch, TreeView
from hocket.randomness import RandomState
from hocket.session.data.loader import END, Cursor, length_of, own_generators
from hocket.session.data.reading import LoaderReading
from hocket.strategy.samples import SampleShuffle, SampleStream
from hocket.transport.peer import Peer, gather

#: What comes next has not been asked for.
_UNREAD: Batch = object()


class StreamCursor(Cursor):
    """A position in one pass over a stream, which reads `following` when it is looked at.

    The number of samples of another rank's batch is unknown, so `weight` stays None.

    Args:
        stream: begins an epoch now; collective.
        reading: in force whenever the stream is read.
        saved: a result of `state_dict`, to continue.
    """

    def __init__(self, stream: SampleStream, reading: LoaderReading, saved: TreeView | None = None) -> None:
        super().__init__(reading)
        self._stream = stream
        if saved is not None:
            stream.load_state_dict(saved["before_newest"])
        with reading:
            self._batches = iter(stream)
        self._before_newest = stream.state_dict()
        self._following: Batch = _UNREAD
        self.first = self.following
        if saved is not None:
            self.num_steps, self.num_read = saved["num_steps"], saved["num_read"]
            if self.num_read:
                self._hand_out()

    @property
    def following(self) -> Batch:
        """Return the next batch; END where there is none. Read it only when the last one has been used."""
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
        peer: all ranks.
        rank, size: the number of the loaders' share of the samples, and the number of shares.
    """

    def __init__(self, exchange: SampleShuffle, peer: Peer, rank: int, size: int) -> None:
        self._exchange, self._peer = exchange, peer
        self._rank, self._size = rank, size
        #: The loader whose batches travel; None before the first pass.
        self._loader: Iterable[Batch] | None = None
        self._stream: SampleStream | None = None
        #: Of the first epoch of this loader: read then, and again, as it was then, when a run is resumed.
        self._reading = LoaderReading(rank, size, 0, peer.status)
        self._start: RandomState | None = None
        self._generators: list[torch.Tensor] = []
        #: Whether the last pass had another loader than the one before it.
        self._renewed = False

    def is_of_another(self, loader: Iterable[Batch]) -> bool:
        """Return whether samples travel, and those of another loader than this one."""
        return self._stream is not None and loader is not self._loader

    def length(self, loader: Iterable[Batch], epoch: int) -> int:
        """Return the number of batches in a pass over `loader` as epoch number `epoch`."""
        if self._stream is not None and loader is self._loader:
            with self._reading:
                return len(self._stream)
        with LoaderReading(self._rank, self._size, epoch):
            return length_of(loader)

    def begin(self, loader: Iterable[Batch], epoch: int) -> StreamCursor:
        """Begin a pass; collective. If any rank has a new loader, all read theirs anew.

        Args:
            loader: this rank's batches.
            epoch: the number of the pass.
        """
        if self._stream is not None:
            self._renewed = any(
                gather(self._peer, loader is not self._loader, what="a pass over session.data")
            )
        if self._stream is None or self._renewed:
            self._wrap(loader, epoch)
            self._start = randomness.read(cuda=True)
            self._generators = [generator.get_state() for generator in own_generators(loader)]
        assert self._stream is not None
        return StreamCursor(self._stream, self._reading)

    def _wrap(self, loader: Iterable[Batch], epoch: int) -> SampleStream:
        """Replace the loader whose batches travel by `loader`; collective."""
        self.close()
        self._loader = loader
        self._reading = LoaderReading(self._rank, self._size, epoch, self._peer.status)
        self._stream = self._exchange.wrap(loader, self._peer, epoch)
        return self._stream

    def resume(
        self,
        loader: Iterable[Batch],
        epoch: int,
        state: TreeView,
        current: TreeView | None,
        now: RandomState,
    ) -> StreamCursor:
        """Continue a pass, or begin the next one; collective.

        Args:
            loader: this rank's batches.
            epoch: the number of the pass.
            state: a result of `state_dict`.
            current: a result of the pass's own `state_dict`; None where no pass was under way.
            now: the random states that training goes on from.
        """
        self._renewed = state["renewed"]
        if current is None and self._renewed:
            return self.begin(loader, epoch)  # each pass had its own
        stream = self._wrap(loader, state["epoch"])
        self._start, self._generators = randomness.from_plain(state["start"]), state["generators"]
        randomness.write(self._start)
        for generator, saved in zip(own_generators(loader), self._generators, strict=True):
            generator.set_state(saved)
        if current is None:
            stream.load_state_dict(state["stream"])
            with self._reading:
                for _ in stream:
                    pass  # at an epoch's end, or left early
        resumed = StreamCursor(stream, self._reading, current)
        randomness.write(now)
        return resumed

    def state_dict(self) -> dict[str, object]:
        """Return the state for a resumed run, beside that of a pass under way."""
        assert self._stream is not None
        assert self._start is not None
        return {
            "stream": self._stream.state_dict(),
            "epoch": self._reading.epoch,
            "renewed": self._renewed,
            "start": randomness.to_plain(self._start),
            "generators": self._generators,
        }

    def close(self) -> None:
        """Give back the stream, where there is one, and what travels in it; collective."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
