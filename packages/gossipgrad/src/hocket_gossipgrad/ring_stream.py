"""The batches of one rank while samples rotate: those it holds, those still to arrive, and those it has sent.

All ranks know the form of every batch from the beginning, so that each is received straight into the memory from which
it will be used, without a message that says how long it is.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import cast

import numpy as np

from hocket.api import Array, Peer, Request, SampleStream, messages, plain
from hocket_gossipgrad.packed_batch import pack


class RingStream(SampleStream):
    """The batches of one rank, epoch by epoch, as `RingShuffle.wrap` returns them.

    Args:
        loader: this rank's batches; read whole when the first epoch begins.
        peer: all ranks; collective.
        epoch: the first one's number.

    Attributes:
        waited_s: seconds, on the peer's clock, in which this rank waited for batches that had not come yet.
        bytes_sent: bytes sent by this rank to the next one.
    """

    def __init__(self, loader: Iterable[plain.Batch], peer: Peer, epoch: int = 0) -> None:
        self.waited_s = 0.0
        self.bytes_sent = 0
        self._loader = loader
        self._peer = peer
        self._lane = peer.lane("samples")
        #: The forms of each rank's own batches, by rank; empty before the first epoch.
        self._forms: list[list[messages.Form]] = []
        self._first_epoch = epoch
        self._epoch = -1
        self._position = 0  # how many batches of this epoch have been handed out
        self._num_sent = 0  # and sent on
        self._current: list[_Batch] = []
        #: The next epoch's, as far as their receives are posted.
        self._next: list[_Batch] = []
        self._sends: deque[tuple[Request, Array]] = deque()

    def __len__(self) -> int:
        """Return the number of batches of the epoch that has begun last; before the first, of the loader."""
        return len(self._current) if self._forms else len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[plain.Batch]:
        if not self._forms:
            self._read()
        else:
            self._begin_next()
        # A generator of its own: the epoch has begun before its first batch is asked for.
        return self._batches(self._epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, -1 before the first, and how many of its batches have been handed out."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: plain.Tree) -> None:
        self._epoch, self._position = state["epoch"], state["position"]

    def close(self) -> None:
        sent = [int(data) for data in self._peer.allgather_bytes(b"%d" % self._num_sent)]
        coming = sent[(self._peer.rank - 1) % self._peer.size]
        self._post_receives(coming)
        for batch in (*self._current, *self._next[:coming]):
            batch.wait()
        for batch in self._next[coming:]:
            batch.withdraw()
        for request, _ in self._sends:
            request.wait()
        self._lane.close()

    def _batches(self, epoch: int) -> Iterator[plain.Batch]:
        forms = self._forms_in(epoch)
        while epoch == self._epoch:
            # The next batch is asked for, so that those before it have been used.
            self._send(self._position)
            if self._position == len(forms):
                self._post_receives(len(self._forms_in(epoch + 1)))
                return
            self._post_receives(self._position + 1)
            number = self._position
            packed = self._arrived(number)
            self._position += 1
            yield forms[number].value(packed)

    def _forms_in(self, epoch: int) -> list[messages.Form]:
        """Return the forms of this rank's batches in an epoch."""
        return self._forms[(self._peer.rank - epoch) % self._peer.size]

    def _read(self) -> None:
        """Read the loader, exchange forms, and begin the first epoch, or the one that was loaded; collective."""
        packed = [pack(batch) for batch in self._loader]
        messages = self._peer.allgather_bytes(_encoded([form for form, _ in packed]))
        self._forms = [_decoded(message) for message in messages]
        memories = [memory for _, memory in packed]
        if self._epoch < 0:
            self._epoch = self._first_epoch
        self._current = [_Batch(memory) for memory in self._dealt(memories)]

    def _dealt(self, own: list[Array]) -> list[Array]:
        """Give each rank what it has in the epoch that begins; collective."""
        rank, size, hops = self._peer.rank, self._peer.size, self._epoch % self._peer.size
        if hops == 0:
            return own
        lane = self._peer.lane("samples, dealt")
        received = [np.empty(form.nbytes, np.uint8) for form in self._forms_in(self._epoch)]
        requests = [
            lane.irecv(memory, (rank - hops) % size, number) for number, memory in enumerate(received)
        ]
        requests += [lane.isend(memory, (rank + hops) % size, number) for number, memory in enumerate(own)]
        for request in requests:
            request.wait()
        lane.close()
        return received

    def _begin_next(self) -> None:
        """Send on what is left, used or not, and begin the next epoch with what comes."""
        self._send(len(self._current))
        self._post_receives(len(self._forms_in(self._epoch + 1)))
        if self._peer.size > 1:
            self._current, self._next = self._next, []
        self._epoch += 1
        self._position = self._num_sent = 0

    def _arrived(self, number: int) -> Array:
        """Wait for a batch of this epoch."""
        start_s = self._peer.clock.now()
        packed = self._current[number].wait()
        self.waited_s += self._peer.clock.now() - start_s
        return packed

    def _send(self, stop: int) -> None:
        """Send on this epoch's batches before number `stop` that have not been sent."""
        while self._sends and self._sends[0][0].done():
            self._sends.popleft()
        if self._peer.size == 1:
            return
        to = (self._peer.rank + 1) % self._peer.size
        for number in range(self._num_sent, stop):
            packed = self._arrived(number)
            self._sends.append((self._lane.isend(packed, to, self._round(number)), packed))
            self._current[number] = _SENT
            self.bytes_sent += packed.nbytes
        self._num_sent = max(self._num_sent, stop)

    def _post_receives(self, stop: int) -> None:
        """Be ready for the next epoch's batches before number `stop`."""
        if self._peer.size == 1 or not self._forms:
            return
        source = (self._peer.rank - 1) % self._peer.size
        forms = self._forms_in(self._epoch + 1)
        for number in range(len(self._next), min(stop, len(forms))):
            memory = np.empty(forms[number].nbytes, np.uint8)
            self._next.append(_Batch(memory, self._lane.irecv(memory, source, self._round(number))))

    def _round(self, number: int) -> int:
        """Return the lane's round of this epoch's batch of that number."""
        return self._epoch * max(map(len, self._forms)) + number


def _encoded(forms: Sequence[messages.Form]) -> bytes:
    """Return forms as a message: each distinct form once, and for every batch the number of its form."""
    numbers: dict[messages.Form, int] = {}
    of_batches = [numbers.setdefault(form, len(numbers)) for form in forms]
    return json.dumps([[each.encode().decode() for each in numbers], of_batches]).encode()


def _decoded(message: bytes) -> list[messages.Form]:
    encoded, of_batches = json.loads(message)
    forms = [messages.Form.decode(each.encode()) for each in encoded]
    return [forms[number] for number in of_batches]


class _Batch:
    """A packed batch that is here or on its way.

    Args:
        memory: uint8, its place now or once it has arrived.
        request: its receive; None where it is here.
    """

    __slots__ = ("_memory", "_request")

    def __init__(self, memory: Array, request: Request | None = None) -> None:
        self._memory = memory
        self._request = request

    def wait(self) -> Array:
        """Return its memory when it is here."""
        if self._request is not None:
            self._request.wait()
            self._request = None
        return self._memory

    def withdraw(self) -> None:
        """Give up its receive."""
        if self._request is not None:
            self._request.withdraw()


#: The placeholder of a batch that was sent on.
_SENT = _Batch(np.empty(0, np.uint8))
