"""The contract of exchanges of samples: kept by one that works, broken by ones that lose, double or change samples."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from hocket.arrays import Array
from hocket.strategy.samples import SampleShuffle, SampleStream
from hocket.testing.samples import SamplesConformance
from hocket.transport.peer import Peer
from hocket.transport.request import Request


class RingStream(SampleStream):
    """The batches of the rank before this one; after a rank's last batch it sends None."""

    def __init__(self, loader: Any, peer: Peer) -> None:
        self._loader = loader
        self._peer = peer
        self._lane = peer.lane("samples")
        self._under_way: list[tuple[Request, Array]] = []
        self._epoch = 0
        self._position = 0
        self._resumes = False

    def __iter__(self) -> Iterator[Any]:
        self._position = self._position if self._resumes else 0
        self._resumes = False
        self._epoch += 1
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        # Resumed ranks stand at different positions where one had no batches left and others had.
        positions = [json.loads(told) for told in self._peer.allgather_bytes(b"%d" % self._position)]
        wanted_from = positions[(self._peer.rank + 1) % self._peer.size]
        batches = itertools.chain(itertools.islice(self._loader, wanted_from, None), [None])
        outgoing = enumerate(batches, start=wanted_from)
        for k in itertools.count(self._position):
            for number, batch in itertools.islice(outgoing, 1):
                self._send(batch, number)
            received = self._receive(k)
            if received is None:
                break
            self._position = k + 1
            yield received
        # The next rank may have more to come than this one got, and this one will not be asked again.
        for number, batch in outgoing:
            self._send(batch, number)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._resumes = state["position"], True

    def _send(self, batch: Any, number: int) -> None:
        data = np.frombuffer(pickle.dumps(batch), dtype=np.uint8)
        to = (self._peer.rank + 1) % self._peer.size
        self._under_way = [sent for sent in self._under_way if not sent[0].done()]
        for message in (np.array([len(data)]), data):
            request = self._lane.isend(message, to, self._epoch << 32 | number)
            self._under_way.append((request, message))

    def _receive(self, number: int) -> Any:
        source, round = (self._peer.rank - 1) % self._peer.size, self._epoch << 32 | number
        length = np.empty(1, dtype=np.int64)
        self._lane.irecv(length, source, round).wait()
        data = np.empty(int(length[0]), dtype=np.uint8)
        self._lane.irecv(data, source, round).wait()
        return pickle.loads(data.tobytes())


@dataclass(frozen=True)
class FromTheRankBefore(SampleShuffle):
    stream: ClassVar[type[RingStream]] = RingStream

    def wrap(self, loader: Any, peer: Peer, epoch: int = 0) -> SampleStream:
        return self.stream(loader, peer)


@dataclass(frozen=True)
class Nothing(SampleShuffle):
    """The trivial exchange, with the other way to keep a position: to count."""

    def wrap(self, loader: Any, peer: Peer, epoch: int = 0) -> SampleStream:
        return CountingStream(loader)


class CountingStream(SampleStream):
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.skip = self.position = 0

    def __iter__(self) -> Iterator[Any]:
        self.position, self.skip = self.skip, 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for batch in itertools.islice(self.loader, self.position, None):
            self.position += 1
            yield tree_map(torch.Tensor.clone, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["position"]


class TestRing(SamplesConformance):
    exchanges = (FromTheRankBefore(),)


class TestNothing(SamplesConformance):
    exchanges = (Nothing(),)


class Losing(RingStream):
    """Drops the last batch that it gets."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())[:-1]


class Doubling(RingStream):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            if self._position == 2:
                yield batch


class Trading(RingStream):
    """Loses one and doubles another: the number is right."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        yield from batches[:1] * len(batches)


class FirstEpochOnly(RingStream):
    """Forgets, in the second epoch, what it has got."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        yield from batches if self._epoch == 1 else batches[1:]


class Widening(RingStream):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield torch.utils._pytree.tree_map(torch.Tensor.double, batch)


class Flattening(RingStream):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield torch.utils._pytree.tree_leaves(batch)


class Backwards(RingStream):
    def __iter__(self) -> Iterator[Any]:
        yield from reversed(list(super().__iter__()))


class Overwriting(RingStream):
    """Receives into one buffer, which it hands out again and again."""

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.zeros(3, dtype=torch.int64)
        for batch in super().__iter__():
            yield buffer[: len(batch)].copy_(batch)


class Scribbling(RingStream):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        for batch in self._loader:
            batch.zero_()


class FirstCome(RingStream):
    """Lets the clock decide about the order."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        late = int(self._peer.clock.now() * 1e3) % 4
        yield from batches[late:] + batches[:late]


class Unsaved(RingStream):
    def state_dict(self) -> dict[str, Any]:
        return {"position": 0}


class Impatient(RingStream):
    """Stops when its own loader does."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())[: len(self._loader)]


class Swallowing(RingStream):
    def __init__(self, loader: Any, peer: Peer) -> None:
        super().__init__(self._careful(loader), peer)

    @staticmethod
    def _careful(loader: Any) -> Iterator[Any]:
        try:
            yield from loader
        except ArithmeticError:
            return


@pytest.mark.parametrize(
    ("stream", "test", "arguments"),
    [
        (Losing, "test_no_sample_is_lost_or_doubled_in_any_epoch", [(4, 4)]),
        (Doubling, "test_no_sample_is_lost_or_doubled_in_any_epoch", [(4, 4)]),
        (Trading, "test_no_sample_is_lost_or_doubled_in_any_epoch", [(4, 4)]),
        (FirstEpochOnly, "test_no_sample_is_lost_or_doubled_in_any_epoch", [(4, 4)]),
        (Overwriting, "test_no_sample_is_lost_or_doubled_in_any_epoch", [(4, 4)]),
        (Impatient, "test_no_sample_is_lost_or_doubled_in_any_epoch", [(3, 5, 4, 1)]),
        (Losing, "test_nor_where_the_loader_has_no_length", [(4, 4)]),
        (Widening, "test_batches_keep_their_form", ["pair"]),
        (Flattening, "test_batches_keep_their_form", ["dictionary"]),
        (Backwards, "test_one_rank_gets_its_own_batches_in_their_order", ["tensor"]),
        (Scribbling, "test_the_loaders_batches_stay_as_they_are", [(4, 4)]),
        (FirstCome, "test_timing_decides_nothing", [(4, 4)]),
        (Unsaved, "test_a_resumed_stream_goes_on_where_it_was_saved", [(4, 4)]),
        (Losing, "test_it_feeds_a_session", [(3, 5, 4, 1)]),
        (Swallowing, "test_an_error_of_the_loader_reaches_the_caller", []),
    ],
)
def test_the_suite_fails_for_what_breaks_the_contract(
    stream: type[RingStream], test: str, arguments: list[Any]
) -> None:
    bad = type("Bad", (FromTheRankBefore,), {"stream": stream})()
    with pytest.raises(AssertionError):
        getattr(SamplesConformance(), test)(bad, *arguments)
