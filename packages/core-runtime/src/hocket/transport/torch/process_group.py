"""Lanes that take buffers where the model lies, by torch's process groups: Gloo on the CPU, NCCL on CUDA.

Operations of all lanes of a set of ranks share one process group, whose backend matches them by their order: every rank
begins the same ones one after the other. Everything else (start-up, control messages, who waits for whom) stays with
the host's peer.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

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
from hocket.transport.request import Finished, Request
from hocket.transport.status import WaitSite
from hocket.transport.waiting import wait
from hocket.transport.wrapper import WrapperPeer

__all__ = ["BACKENDS", "Backend", "ProcessGroupPeer", "open_on_device"]

# A host of the job answers at once, or not at all.
_REACHING_S = 5.0

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

#: One for each set of ranks and device, as communicators are large: a gigabyte of a GPU's memory at times.
_opened: dict[tuple[tuple[int, ...], str], tuple[Store, ProcessGroup]] = {}


def open_on_device(held: HostPeer, device: str) -> Peer | None:
    """Return the same ranks' endpoint for buffers on their `device`; collective.

    Args:
        held: the ranks.
        device: a torch device that is there, for instance "cuda:0".

    Returns:
        None, on all ranks alike, where nothing carries such buffers.

    Raises:
        TransportError: a rank cannot reach the group's store.
    """
    backend = BACKENDS.get(torch.device(device).type)
    if not all(gather(held, backend is not None)) or backend is None:
        return None
    ranks = tuple(map(held.world_rank_of, range(held.size)))
    if (ranks, device) not in _opened:  # on all of them alike: each has opened the same ones before
        store = _store(held)
        group = backend.open(PrefixStore("hocket", store), held.rank, held.size, held.timeout_s)
        _opened[ranks, device] = store, group
    return ProcessGroupPeer(held, backend.name, device, _opened[ranks, device][1])


def _store(held: HostPeer) -> Store:
    """Return a store of the ranks' own, which their first one runs; collective."""
    timeout = timedelta(seconds=held.timeout_s)
    store, place = None, None
    if held.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        place = [network_host(), host_addresses(), store.port]
    host, addresses, port = gather(held, place)[0]
    if store is None:
        near = host == network_host()
        address = "127.0.0.1" if near else _reached(held, addresses, port)
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store


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
        if together:  # NCCL's own group: what is in one cannot wait for another of it
            group._start_coalescing()
        works = [group.recv([data], source, 0) for data, source in received]
        works += [group.send([data], to, 0) for data, to in sent]
        if together:
            works = [group._end_coalescing()]
        others = sorted({rank for _, rank in (*sent, *received)})
        return _Work(self, "an exchange with neighbours", works, [*sent, *received], others, polls=together)

    def iallreduce(self, send: Buffer, receive: Buffer) -> Request:
        total = self._begun_in_place(send, receive)
        options = AllreduceOptions()
        options.asyncOp = True
        return _Work(self, "allreduce", [self.peer.process_group.allreduce([total], options)], [total])

    def ireduce(self, send: Buffer, receive: Buffer | None, root: int) -> Request:
        # The backends sum in place, and may leave anything in what the others give.
        total = _tensor(send).clone() if receive is None else self._begun_in_place(send, receive)
        options = ReduceOptions()
        options.rootRank, options.asyncOp = root, True
        return _Work(self, "reduce", [self.peer.process_group.reduce([total], options)], [total])

    def ibroadcast(self, data: Buffer, root: int) -> Request:
        given = _tensor(data)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return _Work(self, "broadcast", [self.peer.process_group.broadcast([given], options)], [given])

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
        works: torch's own futures of it.
        buffers: that it reads and writes, kept for as long as it does.
        others: whom it waits for; all ranks where None.
        polls: whether the backend tells that it is done before somebody waits: Gloo's messages do not.
    """

    def __init__(
        self,
        lane: ProcessGroupLane,
        what: str,
        works: Sequence[Any],
        buffers: Sequence[object],
        others: Sequence[int] | None = None,
        *,
        polls: bool = True,
    ) -> None:
        self._lane, self._what, self._works = lane, what, works
        self._buffers: Sequence[object] = buffers
        self._others = [r for r in range(lane.size) if r != lane.rank] if others is None else others
        self._polls, self._over = polls, False

    def done(self) -> bool:
        if not self._over and self._polls and all(work.is_completed() for work in self._works):
            self._join(None)
        return self._over

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait on the CPU; on a device have the current stream wait, and return at once."""
        peer = self._lane.peer
        timeout_s = peer.timeout_s if timeout_s is None else timeout_s
        if peer.device == "cpu" and self._polls and not self._over:
            # Never within torch, which heeds neither Ctrl-C nor the deaths of others.
            peer.held.status.note_waiting(self._what, self._lane.name)
            wait(self.done, timeout_s, self._describe_stall, check=self._check)
            peer.held.status.note_computing()
        else:
            self._join(timeout_s)

    def _join(self, timeout_s: float | None) -> None:
        try:
            for work in self._works:
                if timeout_s is None or self._lane.peer.device != "cpu":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._check()
            reason = str(error).partition(". ")[0].splitlines()[0]
            raise TransportError(
                f"{self._where()}: {reason}: has another rank ended, or has a model or a strategy of its own?"
            ) from error
        self._over = True
        if self._lane.peer.device == "cpu":
            self._buffers = ()

    def _check(self) -> None:
        self._lane.peer.held.status.failures.check(self._where)

    def _where(self) -> str:
        return f"rank {self._lane.peer.held.world_rank}: {self._lane.name} ({self._what})"

    def _describe_stall(self, outcome: str) -> str:
        held = self._lane.peer.held
        ranks = [held.world_rank_of(rank) for rank in self._others]
        site = WaitSite(self._lane.name, self._what, ranks, together=len(ranks) == held.size - 1)
        return held.status.describe_stall(site, outcome)


def _tensor(data: Buffer) -> Tensor:
    return torch.from_numpy(data) if isinstance(data, np.ndarray) else data
