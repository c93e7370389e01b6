"""Lanes that take buffers on the model's device, by torch's process groups.

Operations of all lanes of a set of ranks share one process group, whose backend matches them by their order: every rank
begins the same ones one after the other. All else (start-up, control messages, reports on waits) stays with the host's
peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    ReduceOptions,
)

from hocket.arrays import Array, Buffer
from hocket.errors import TransportError
from hocket.transport.device.groups import DeviceGroup, open_group
from hocket.transport.device.operation import DeviceOperation
from hocket.transport.host.peer import HostPeer
from hocket.transport.lane import Lane
from hocket.transport.peer import Memory, Peer
from hocket.transport.request import Finished, Request
from hocket.transport.wrapper import WrapperPeer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work


def open_on_device(held: HostPeer, device: str) -> Peer | None:
    """Return the same ranks' endpoint for buffers on their `device`, None if no backend carries them; collective.

    Raises:
        TransportError, ExchangeTimeoutError: see `open_group`.
    """
    group = open_group(held, device)
    return None if group is None else ProcessGroupPeer(group)


class ProcessGroupPeer(WrapperPeer):
    """The ranks of a host's peer, for buffers on a device."""

    held: HostPeer

    def __init__(self, device_group: DeviceGroup) -> None:
        super().__init__(device_group.ranks)
        self.device_group = device_group
        self.transport, self.device, self.ordered = device_group.backend, device_group.device, True
        self.memory = Memory()  # what is shared lies in host memory

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
        self._group = peer.device_group.process_group

    def isend(self, data: Buffer, to: int, round: int) -> Request:
        self._refuse("messages, except in an exchange with neighbours")

    def irecv(self, data: Buffer, source: int, round: int) -> Request:
        self._refuse("messages, except in an exchange with neighbours")

    def iallgather(self, send: Buffer, receive: Buffer) -> Request[list[Array]]:
        self._refuse("messages of different lengths")

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        if not sends and not receives:
            return Finished()
        group = self._group
        sent = [(_tensor(data), to) for data, to in sends]
        received = [(_tensor(data), source) for data, source in receives]
        together = bool(group.supports_coalescing)

        def begin() -> list[Work]:
            if together:  # NCCL's own group: what is in one cannot wait for another of it
                group._start_coalescing()
            works = [group.recv([data], source, 0) for data, source in received]
            works += [group.send([data], to, 0) for data, to in sent]
            return [group._end_coalescing()] if together else works

        others = sorted({rank for _, rank in (*sent, *received)})
        return self._begun("an exchange with neighbours", begin, [*sent, *received], others, polls=together)

    def iallreduce(self, send: Buffer, receive: Buffer) -> Request:
        total = self._given_in_place(send, receive)
        options = AllreduceOptions()
        options.asyncOp = True
        return self._begun("allreduce", lambda: [self._group.allreduce([total], options)], [total])

    def ireduce(self, send: Buffer, receive: Buffer | None, root: int) -> Request:
        # The backends sum in place, and may leave anything in what the others give.
        total = _tensor(send).clone() if receive is None else self._given_in_place(send, receive)
        options = ReduceOptions()
        options.rootRank, options.asyncOp = root, True
        return self._begun("reduce", lambda: [self._group.reduce([total], options)], [total])

    def ibroadcast(self, data: Buffer, root: int) -> Request:
        given = _tensor(data)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return self._begun("broadcast", lambda: [self._group.broadcast([given], options)], [given])

    def ibarrier(self) -> Request:
        one: Any = torch.ones(1, device=self.peer.device)
        return self.iallreduce(one, one)

    def close(self) -> None:
        """Do nothing: the process group is shared with other lanes, and with later sessions."""

    def _begun(
        self,
        what: str,
        begin: Callable[[], Sequence[Work]],
        buffers: Sequence[object],
        others: Sequence[int] | None = None,
        *,
        polls: bool = True,
    ) -> Request:
        return DeviceOperation(self.peer.device_group, self.name, what, begin, buffers, others, polls=polls)

    def _given_in_place(self, send: Buffer, receive: Buffer) -> Tensor:
        given, total = _tensor(send), _tensor(receive)
        if given.data_ptr() != total.data_ptr():
            total.copy_(given)
        return total

    def _refuse(self, what: str) -> NoReturn:
        raise TransportError(
            f"rank {self.peer.held.world_rank}: {self.name}: lanes on {self.peer.device} cannot send {what}: use "
            "lanes='host'"
        )


def _tensor(data: Buffer) -> Tensor:
    return torch.from_numpy(data) if isinstance(data, np.ndarray) else data
