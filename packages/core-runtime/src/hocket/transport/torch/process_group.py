"""Lanes that take buffers where the model lies, by torch's process groups: Gloo on the CPU, NCCL on CUDA.

Operations of all lanes of a set of ranks share one process group, whose backend matches them by their order: every rank
begins the same ones one after the other. Everything else (start-up, control messages, who waits for whom) stays with
the host's peer.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOptions,
    Store,
    TCPStore,
)

from hocket.arrays import Buffer
from hocket.errors import TransportError
from hocket.transport.host.peer import HostPeer
from hocket.transport.lane import Lane
from hocket.transport.meeting.addresses import host_addresses, network_host
from hocket.transport.peer import Memory, Peer, gather
from hocket.transport.progress import Progress
from hocket.transport.request import Finished, Request
from hocket.transport.status import WaitSite
from hocket.transport.threads import ThreadRequest
from hocket.transport.waiting import wait
from hocket.transport.wrapper import WrapperPeer

__all__ = ["BACKENDS", "Backend", "ProcessGroupPeer", "open_on_device"]

# A host of the job answers at once, or not at all.
_REACHING_S = 5.0

# A backend gives up so much later than a rank that waits, in seconds: that one can say for whom.
_LATER_S = 30.0

# The same for Gloo, which counts from an operation's start, and which closes a group where one operation takes longer.
_FOR_EVER = timedelta(days=30)

# So soon after a connection has been closed, in seconds, the host's peer knows whether a rank has died.
_KNOWN_WITHIN_S = 1.0

#: torch's `Backend`, whose stubs leave out most of what it has.
ProcessGroup = Any


class Backend(NamedTuple):
    """What carries a device's buffers.

    Attributes:
        name: torch's name of it.
        open: from a store, the rank, the number of ranks and the seconds that waits last to a process group.
    """

    name: str
    open: Callable[[Store, int, int, float], ProcessGroup]


def _gloo(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, size, options)


#: What carries the buffers of each type of device.
BACKENDS = {"cpu": Backend("gloo", _gloo), "cuda": Backend("nccl", _nccl)}

# Of each job, one for each set of ranks and device: communicators take up to a gigabyte of a GPU's memory.
_Opened = dict[tuple[tuple[int, ...], str], tuple[Store, ProcessGroup]]
_opened: WeakKeyDictionary[Progress, _Opened] = WeakKeyDictionary()

# Kept, as the end of such a group waits for what is under way in it.
_given_up: list[tuple[Store, ProcessGroup]] = []


def open_on_device(held: HostPeer, device: str) -> Peer | None:
    """Return the same ranks' endpoint for buffers on their `device`; collective.

    Args:
        held: the ranks.
        device: a torch device that is there, for instance "cuda:0".

    Returns:
        None, on all ranks alike, where nothing carries such buffers.

    Raises:
        TransportError: on all ranks: one of them cannot reach the group's store. On one: its backend's refusal.
        ExchangeTimeoutError: not all ranks have connected in time; names them.
    """
    backend = BACKENDS.get(torch.device(device).type)
    opened = _opened.setdefault(held.progress, {})
    key = tuple(map(held.world_rank_of, range(held.size))), device
    told = gather(held, [backend is not None, key in opened])
    if backend is None or not all(carries for carries, _ in told):
        return None
    if not all(has for _, has in told):  # a rank may have given its own up, or have trained on another device
        _give_up(opened, key)
        opened[key] = _open(held, backend, device)
    store, group = opened[key]
    longest = timedelta(seconds=held.timeout_s + _LATER_S)
    store.set_timeout(longest)
    group._set_default_timeout(_FOR_EVER if backend.name == "gloo" else longest)
    return ProcessGroupPeer(held, backend.name, device, group)


def _give_up(opened: _Opened, key: tuple[tuple[int, ...], str]) -> None:
    if key in opened:
        _given_up.append(opened.pop(key))


def _open(held: HostPeer, backend: Backend, device: str) -> tuple[Store, ProcessGroup]:
    """Connect the ranks by a process group of their own; collective."""
    store = _store(held)
    lane, what = f"lanes on {device}", f"connecting by {backend.name}"
    longest_s = held.timeout_s + _LATER_S

    def connect() -> ProcessGroup:
        return backend.open(PrefixStore("hocket", store), held.rank, held.size, longest_s)

    opening = _aside(held, connect)
    others = [rank for rank in range(held.size) if rank != held.rank]
    _wait(held, opening.done, held.timeout_s, lane, what, others)
    try:
        return store, opening.wait()
    except RuntimeError as error:
        raise _explained(
            held,
            f"rank {held.world_rank}: {lane} ({what})",
            error,
            f"do ranks reach each other by the interface that {backend.name.upper()}_SOCKET_IFNAME names, or the "
            "host's name? lanes='host' does without",
        ) from error


def _store(held: HostPeer) -> Store:
    """Return a store of the ranks' own, which their first one runs; collective."""
    store: Store | None = None
    place, refusal = None, None
    try:
        if held.rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            place = [network_host(), host_addresses(), store.port]
    except RuntimeError as error:
        refusal = f"rank {held.world_rank} cannot open a store for lanes on devices: {_reason(error)}"
    place = gather(held, place)[0]
    try:
        if store is None and place is not None:
            store = _connected(held, *place)
    except (RuntimeError, TransportError) as error:
        refusal = str(error)
    refusals = [told for told in gather(held, refusal) if told is not None]
    if store is None or refusals:
        raise TransportError(refusals[0])
    return store


def _connected(held: HostPeer, host: str, addresses: Sequence[str], port: int) -> Store:
    address = "127.0.0.1" if host == network_host() else _reached(held, addresses, port)
    timeout = timedelta(seconds=held.timeout_s)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _reached(held: HostPeer, addresses: Sequence[str], port: int) -> str:
    for address in addresses:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), _REACHING_S).close()
            return address
    raise TransportError(
        f"rank {held.world_rank}: rank {held.world_rank_of(0)}'s store for lanes on devices is out of reach at "
        f"{', '.join(addresses)}, port {port}: does a firewall let all ports pass? lanes='host' needs those of "
        "HOCKET_PORTS alone"
    )


class ProcessGroupPeer(WrapperPeer):
    """The ranks of a host's peer, for buffers on a device.

    Args:
        held: the ranks.
        name: the backend's.
        device: where the buffers of its lanes lie.
        process_group: of these ranks.
    """

    held: HostPeer

    def __init__(self, held: HostPeer, name: str, device: str, process_group: ProcessGroup) -> None:
        super().__init__(held)
        self.transport, self.device, self.ordered = name, device, True
        self.shares_network = False
        self.memory = Memory()  # what is shared lies in host memory
        self.process_group = process_group

    def give_up(self) -> None:
        """Have sessions that are attached from now on use another process group: in this one ranks are apart."""
        opened = _opened.get(self.held.progress, {})
        for key in [key for key, (_, group) in opened.items() if group is self.process_group]:
            _give_up(opened, key)

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        return ProcessGroupLane(self, name)

    def group(self, ranks: Sequence[int]) -> Peer | None:
        group = self.held.group(ranks)
        return None if group is None else group.on_device(self.device)


class ProcessGroupLane(Lane):
    """A lane whose operations begin in the same order on every rank, among those of all lanes of its peer.

    Buffers are tensors on the peer's device; NumPy arrays where that is the CPU.
    """

    def __init__(self, peer: ProcessGroupPeer, name: str) -> None:
        self.peer, self.name = peer, name
        self.rank, self.size = peer.rank, peer.size

    def isend(self, data: Buffer, to: int, round: int) -> Request:
        self._refuse("messages, but for those of an exchange with neighbours")

    def irecv(self, data: Buffer, source: int, round: int) -> Request:
        self._refuse("messages, but for those of an exchange with neighbours")

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        self._refuse("messages of different lengths")

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        if not sends and not receives:
            return Finished()
        group = self.peer.process_group
        sent = [(_tensor(data), to) for data, to in sends]
        received = [(_tensor(data), source) for data, source in receives]
        together = bool(group.supports_coalescing)

        def begin() -> list[Any]:
            if together:  # NCCL's own group: what is in one cannot wait for another of it
                group._start_coalescing()
            works = [group.recv([data], source, 0) for data, source in received]
            works += [group.send([data], to, 0) for data, to in sent]
            return [group._end_coalescing()] if together else works

        others = sorted({rank for _, rank in (*sent, *received)})
        return _Work(self, "an exchange with neighbours", begin, [*sent, *received], others, polls=together)

    def iallreduce(self, send: Buffer, receive: Buffer) -> Request:
        total = self._begun_in_place(send, receive)
        options = AllreduceOptions()
        options.asyncOp = True
        return _Work(
            self, "allreduce", lambda: [self.peer.process_group.allreduce([total], options)], [total]
        )

    def ireduce(self, send: Buffer, receive: Buffer | None, root: int) -> Request:
        # The backends sum in place, and may leave anything in what the others give.
        total = _tensor(send).clone() if receive is None else self._begun_in_place(send, receive)
        options = ReduceOptions()
        options.rootRank, options.asyncOp = root, True
        return _Work(self, "reduce", lambda: [self.peer.process_group.reduce([total], options)], [total])

    def ibroadcast(self, data: Buffer, root: int) -> Request:
        given = _tensor(data)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return _Work(
            self, "broadcast", lambda: [self.peer.process_group.broadcast([given], options)], [given]
        )

    def ibarrier(self) -> Request:
        one: Any = torch.ones(1, device=self.peer.device)
        return self.iallreduce(one, one)

    def close(self) -> None:
        """Do nothing: the process group is shared with other lanes, and with later sessions."""

    def _begun_in_place(self, send: Buffer, receive: Buffer) -> Tensor:
        given, total = _tensor(send), _tensor(receive)
        if given.data_ptr() != total.data_ptr():
            total.copy_(given)
        return total

    def _refuse(self, what: str) -> NoReturn:
        raise TransportError(
            f"rank {self.peer.held.world_rank}: {self.name}: lanes on {self.peer.device} carry no {what}: use "
            "lanes='host'"
        )


class _Work(Request):
    """What a process group is doing.

    Args:
        lane: where.
        what: the operation, for messages.
        begin: begins it, and returns torch's own futures of it.
        buffers: that it reads and writes, kept for as long as it does.
        others: whom it waits for; all ranks where None.
        polls: whether the backend tells that it is done before somebody waits: Gloo's messages do not.
    """

    def __init__(
        self,
        lane: ProcessGroupLane,
        what: str,
        begin: Callable[[], Sequence[Any]],
        buffers: Sequence[object],
        others: Sequence[int] | None = None,
        *,
        polls: bool = True,
    ) -> None:
        self._lane, self._what, self._polls = lane, what, polls
        self._others = [r for r in range(lane.size) if r != lane.rank] if others is None else others
        self._buffers, self._over = buffers, False
        self._aside: Request | None = None
        try:
            self._works = begin()
        except RuntimeError as error:
            raise self._failed(error) from error

    def done(self) -> bool:
        if not self._over and self._is_there():
            self._end()
        return self._over

    def _is_there(self) -> bool:
        if self._aside is not None:
            return self._aside.done()
        return self._polls and all(work.is_completed() for work in self._works)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait on the CPU; on a device have the current stream wait, and return at once."""
        peer = self._lane.peer
        if self._over:
            return
        if peer.device != "cpu":
            self._end()
            return
        if not self._polls and self._aside is None:
            self._aside = _aside(peer.held, self._join)
        timeout_s = peer.timeout_s if timeout_s is None else timeout_s
        try:
            _wait(peer.held, self.done, timeout_s, self._lane.name, self._what, self._others)
        except TransportError:
            peer.give_up()
            raise

    def _join(self) -> None:
        for work in self._works:
            if self._lane.peer.device == "cpu":
                work.wait(_FOR_EVER)
            else:
                work.wait()

    def _end(self) -> None:
        try:
            if self._aside is None:
                self._join()
            else:
                self._aside.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._over = True
        if self._lane.peer.device == "cpu":
            self._buffers = ()

    def _failed(self, error: RuntimeError) -> TransportError:
        self._lane.peer.give_up()
        held = self._lane.peer.held
        where = f"rank {held.world_rank}: {self._lane.name} ({self._what})"
        return _explained(
            held, where, error, "has another rank ended, or has a model or a strategy of its own?"
        )


def _aside(held: HostPeer, call: Callable[[], Any]) -> Request:
    """Begin a call into torch in a thread: while it waits nobody there hears of Ctrl-C, or of others' deaths."""
    return ThreadRequest(held, "torch", call, None)


def _wait(
    held: HostPeer,
    done: Callable[[], bool],
    timeout_s: float,
    lane: str,
    what: str,
    others: Sequence[int],
) -> None:
    """Wait for what torch does, and answer meanwhile what other ranks ask of this one.

    Args:
        held: the ranks.
        done: whether it is over.
        timeout_s: seconds to wait at most.
        lane, what: where, and for which operation.
        others: the ranks that it needs.

    Raises:
        ExchangeTimeoutError: it is not over in time; names this rank and those it needs.
        PeerLostError: a rank has died.
    """

    def look() -> bool:
        held.progress.advance()
        return done()

    def describe(outcome: str) -> str:
        ranks = [held.world_rank_of(rank) for rank in others]
        site = WaitSite(lane, what, ranks, together=len(ranks) == held.size - 1)
        return held.status.describe_stall(site, outcome)

    def check() -> None:
        held.status.check(lambda: f"rank {held.world_rank}: {lane} ({what})")

    if done():
        return
    held.status.note_waiting(what, lane)
    wait(look, timeout_s, describe, check=check)
    held.status.note_computing()


def _explained(held: HostPeer, where: str, error: RuntimeError, hint: str) -> TransportError:
    """Return what an error of torch's means: it tells of connections, and not of the rank that has died."""
    end_s = time.monotonic() + _KNOWN_WITHIN_S
    while not (dead := held.status.failures.dead()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return (
        held.status.failures.lost(where, dead)
        if dead
        else TransportError(f"{where}: {_reason(error)}: {hint}")
    )


def _reason(error: RuntimeError) -> str:
    """Return torch's words, without where in its source they come from."""
    line = (str(error).splitlines() or [""])[0].rstrip(". ")
    return line.partition("] ")[2] if line.startswith("[") else line


def _tensor(data: Buffer) -> Tensor:
    return torch.from_numpy(data) if isinstance(data, np.ndarray) else data
