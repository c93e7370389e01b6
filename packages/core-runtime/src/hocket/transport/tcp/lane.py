"""Lanes over the wire: two spaces of messages, and shared memory for large collectives within one host."""

from __future__ import annotations

import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hocket.arrays import Array, as_bytes, is_same_memory
from hocket.schedule.builders import (
    binomial_broadcast,
    binomial_reduce,
    recursive_doubling_allreduce,
    ring_allreduce,
)
from hocket.schedule.schedule import Schedule
from hocket.transport.gathering import check_gathering, gathered
from hocket.transport.host import HostPeer, open_host_collectives
from hocket.transport.lane import Mixer
from hocket.transport.program import NOTHING, Program, program_on
from hocket.transport.request import Finished, Request
from hocket.transport.tcp.request import (
    CollectiveCall,
    GatherRequest,
    ReceiveRequest,
    TcpOperation,
    WireLane,
)
from hocket.transport.tcp.wire import Key, Wire

#: From so many bytes on an allreduce sends the fewest bytes, below it has the fewest stages.
RING_BYTES = 1 << 16

_SPACES = struct.Struct("<QQ")
#: A word on every gathering, as of `Program.call`; calls and their data differ, as Ctrl-C may come between them.
_GATHERING, _WORDS = zlib.crc32(b"allgather"), zlib.crc32(b"a call")


class TcpLane(WireLane):
    """A lane over the wire, with two spaces of messages of its own.

    Args:
        wire: carries them.
        path: a name of the lane, unique in the job and equal on all of its ranks.
        capacity_bytes: as for `Peer.lane`; large collectives use shared memory where all ranks have one host.
    """

    def __init__(self, peer: HostPeer, wire: Wire, name: str, path: str, capacity_bytes: int = 0) -> None:
        digest = hashlib.blake2b(path.encode(), digest_size=_SPACES.size).digest()
        self._messages, calls = _SPACES.unpack(digest)
        super().__init__(peer, name, wire, calls)
        self._rounds = itertools.count()
        self._programs: dict[tuple[object, ...], Program] = {}
        self._host = open_host_collectives(self, capacity_bytes)

    def isend(self, data: Array, to: int, round: int) -> Request:
        rank = self.peer.world_ranks[to]
        sending = TcpOperation(self, f"send to rank {rank}, round {round}", to)
        if self.wire.send(Key(self._messages, rank, round), as_bytes(data), 0, sending.finish):
            sending.finish()
        return sending

    def irecv(self, data: Array, source: int, round: int) -> Request:
        rank = self.peer.world_ranks[source]
        key = Key(self._messages, rank, round)
        return ReceiveRequest(self, f"receive from rank {rank}, round {round}", key, as_bytes(data), source)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        shared = None if self._host is None else self._host.allreduce(send, receive)
        if shared is not None:
            return shared
        build = ring_allreduce if receive.nbytes >= RING_BYTES else recursive_doubling_allreduce
        return self._run("allreduce", receive, partial(build, self.rank, self.size), given=send)

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        return None if self._host is None else self._host.mixer(places)

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        build = partial(binomial_reduce, self.rank, self.size, root=root)
        what = f"reduce to rank {self.peer.world_ranks[root]}"
        if self.rank != root or receive is None:
            return self._run(what, send, build, keeps=True)
        return self._run(what, receive, build, given=send)

    def ibroadcast(self, data: Array, root: int) -> Request:
        shared = None if self._host is None else self._host.broadcast(data, root)
        if shared is not None:
            return shared
        what = f"broadcast from rank {self.peer.world_ranks[root]}"
        build = partial(binomial_broadcast, self.rank, self.size, root=root)
        return self._run(what, as_bytes(data), build, other=root)

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        check_gathering(f"rank {self.peer.world_rank}: {self.name}", send, receive, self.size)
        if self.size == 1:
            receive[0, : send.size] = send
            return Finished(gathered(receive, [send.size]))
        return GatherRequest(self, "allgather", _GATHERING, next(self._rounds), send, receive)

    def gather_words(self, send: Array, receive: Array, what: str) -> GatherRequest:
        """Begin to gather what two or more ranks are about to do, named `what`, with unchecked buffers."""
        return GatherRequest(self, what, _WORDS, next(self._rounds), send, receive)

    def ibarrier(self) -> Request:
        build = partial(recursive_doubling_allreduce, self.rank, self.size)
        return self._run("barrier", NOTHING, build)

    def close(self) -> None:
        self.ibarrier().wait()
        self.wire.close(self._messages, self._calls)
        self._programs.clear()
        self._host = None  # which knows this lane: nothing keeps shared memory longer than it is needed

    def _run(
        self,
        what: str,
        data: Array,
        build: Callable[[Array], Schedule],
        *,
        given: Array | None = None,
        other: int | None = None,
        keeps: bool = False,
    ) -> Request:
        """Carry out a schedule; reuse an earlier one for the same memory.

        Args:
            what: the operation, for messages.
            data: the buffer that it works on.
            build: makes the schedule.
            given: is copied into `data` first, unless it is the same memory.
            other: the root of a broadcast; None where all wait for all.
            keeps: whether `data` must stay unchanged: the schedule then works on a copy.
        """
        if given is not None and not is_same_memory(given, data):
            np.copyto(data, given)
        if self.size == 1:
            return Finished()
        program = program_on(self._programs, what, data, build, copies=keeps)
        return CollectiveCall(self, what, program, next(self._rounds), other)
