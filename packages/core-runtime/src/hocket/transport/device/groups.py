"""Process groups of torch that carry a device's buffers: Gloo on the CPU, NCCL on CUDA."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hocket.errors import TransportError
from hocket.transport.device.waiting import explain, first_line, start_aside, wait_for_torch
from hocket.transport.host.peer import HostPeer
from hocket.transport.meeting.addresses import host_addresses, network_host
from hocket.transport.peer import gather
from hocket.transport.pending import Progress

# A host of the job answers at once, or not at all.
_REACHING_S = 5.0

# A backend gives up so much later than a rank that waits, in seconds: that one can say for whom.
_LATER_S = 30.0

#: The same for Gloo, which counts from an operation's start, and which closes a group where one operation takes longer.
FOR_EVER = timedelta(days=30)

#: torch's `Backend`, whose stubs leave out most of what it has.
ProcessGroup = Any


class Backend(NamedTuple):
    """A backend of torch that carries a device's buffers.

    Attributes:
        name: torch's name of it.
        open: function from a store, the rank, the number of ranks and a timeout in seconds to a process group.
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


class DeviceGroup(NamedTuple):
    """The process group that carries the ranks' buffers on a device.

    Attributes:
        ranks: the host's peer of the same ranks.
        device: the buffers' device.
        backend: the backend's name.
        process_group: torch's own.
    """

    ranks: HostPeer
    device: str
    backend: str
    process_group: ProcessGroup

    def give_up(self) -> None:
        """Make later sessions use another process group, as ranks are out of step in this one."""
        opened = _opened.get(self.ranks.progress, {})
        for key in [key for key, (_, group) in opened.items() if group is self.process_group]:
            _give_up(opened, key)


def open_group(held: HostPeer, device: str) -> DeviceGroup | None:
    """Return the ranks' process group for buffers on their `device`, which is opened once; collective.

    Args:
        held: the ranks.
        device: a torch device that is there, for instance "cuda:0".

    Returns:
        None, on all ranks alike, if no backend carries such buffers.

    Raises:
        TransportError: on all ranks: one of them cannot reach the group's store. On one: its backend's refusal.
        ExchangeTimeoutError: not all ranks have connected in time; names them.
    """
    backend = BACKENDS.get(torch.device(device).type)
    opened = _opened.setdefault(held.progress, {})
    key = tuple(held.world_ranks), device
    rows = gather(held, [backend is not None, key in opened])
    if backend is None or not all(carries for carries, _ in rows):
        return None
    if not all(has for _, has in rows):  # a rank may have given its own up, or have trained on another device
        _give_up(opened, key)
        opened[key] = _open(held, backend, device)
    store, group = opened[key]
    longest = timedelta(seconds=held.timeout_s + _LATER_S)
    store.set_timeout(longest)
    group._set_default_timeout(FOR_EVER if backend.name == "gloo" else longest)
    return DeviceGroup(held, device, backend.name, group)


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

    opening = start_aside(held, connect)
    others = [rank for rank in range(held.size) if rank != held.rank]
    wait_for_torch(held, opening.done, held.timeout_s, lane, what, others)
    try:
        return store, opening.wait()
    except RuntimeError as error:
        raise explain(
            held,
            f"rank {held.world_rank}: {lane} ({what})",
            f"rank {held.world_rank} could not connect to the other ranks by {backend.name} for {lane}",
            error,
            f"Check that ranks can reach each other over the interface in {backend.name.upper()}_SOCKET_IFNAME or, if "
            "that is unset, by the host's name. lanes='host' works without this connection",
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
        refusal = f"rank {held.world_rank} cannot open a store for lanes on devices: {first_line(error)}"
    place = gather(held, place)[0]
    try:
        if store is None and place is not None:
            store = _connected(held, *place)
    except (RuntimeError, TransportError) as error:
        refusal = str(error)
    refusals = [each for each in gather(held, refusal) if each is not None]
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
        f"rank {held.world_rank} cannot reach the store of rank {held.world_ranks[0]} at {', '.join(addresses)}, port "
        f"{port}, which sets up lanes on devices: does a firewall block ports? lanes='host' needs only those of "
        "HOCKET_PORTS"
    )
