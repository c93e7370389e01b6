"""A world of virtual ranks, and the caller's rank among them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from hocket.errors import TransportError, UserError
from hocket.transport.network import NetworkModel
from hocket.transport.peer import DEFAULT_TIMEOUT_S, Peer
from hocket.transport.virtual.fabric import Fabric
from hocket.transport.virtual.peer import GroupState, VirtualPeer
from hocket.transport.virtual.request import Station
from hocket.transport.virtual.scheduler import Scheduler

T = TypeVar("T")
_peer: ContextVar[Peer | None] = ContextVar("hocket_virtual_peer", default=None)


def current_peer() -> Peer | None:
    """Return the endpoint of the virtual rank that calls this, None outside `VirtualWorld.run`."""
    return _peer.get()


class VirtualWorld:
    """A world of `size` virtual ranks: threads of this process under a deterministic scheduler and a virtual clock.

    The same function, seed and network give the same run: the same order of all events, at the same times.

    Attributes:
        elapsed_s: virtual seconds of the last run, until its last rank ended.
        num_messages: number of point-to-point messages in it.
        num_bytes: their bytes together.
        killed: the ranks that faults killed in it, in the order of their deaths.
    """

    def __init__(
        self,
        size: int,
        *,
        network: NetworkModel | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        wrap: Callable[[Peer], Peer] | None = None,
    ) -> None:
        """Describe a world; no rank runs before `run`.

        Args:
            size: number of ranks, at least 1.
            network: the cost of messages; `NetworkModel()` where None.
            seed: of the order of ranks that are due at the same virtual time.
            timeout_s: default timeout of waits, in virtual seconds.
            wrap: wraps each rank's endpoint, for instance `Faults(...).wrap`.

        Raises:
            ValueError: `size` below 1.
        """
        if size < 1:
            raise ValueError(f"a world has at least 1 rank, not {size}")
        self.size = size
        self.network = NetworkModel() if network is None else network
        self.seed = seed
        self.timeout_s = timeout_s
        self.wrap = wrap
        self.killed: list[int] = []
        self.elapsed_s = 0.0
        self.num_messages = 0
        self.num_bytes = 0

    def run(self, call: Callable[..., T], *args: Any) -> list[T]:
        """Run `call(*args)` on every rank and return the results, by rank; None for a killed rank.

        Each run starts with a clock at 0 and, on every rank, a copy of the caller's global random states,
        which are the caller's again afterwards. On a rank, `current_peer()` is its endpoint.

        Raises:
            BaseException: the first failed rank's error, with a note that names the rank. The other ranks get
                PeerLostError from their next use of the transport.
            UserError: the system starts no thread for each rank.
            DeadlockError: all ranks wait, and no event is planned that could wake one.
        """
        scheduler = Scheduler(self.seed)
        fabric = Fabric(scheduler.timeline, self.network, self.size)
        everyone = GroupState(tuple(range(self.size)))

        def enter(rank: int) -> T:
            station = Station(scheduler, fabric, self.network, rank)
            peer = VirtualPeer(everyone, station, rank, self.timeout_s)
            _peer.set(peer if self.wrap is None else self.wrap(peer))
            return call(*args)

        try:
            tasks = [scheduler.spawn(rank, "main", partial(enter, rank)) for rank in range(self.size)]
        except RuntimeError as error:  # Python's word for EAGAIN
            started = len(scheduler.timeline.tasks)
            refusal = (
                f"{self.size} virtual ranks take {self.size} threads, but the system starts only {started} more: use "
                "fewer ranks (-n), or raise its limits (ulimit -u, kernel.threads-max, vm.max_map_count, a container's "
                "pids.max)"
            )
            scheduler.end(lambda: TransportError(refusal))
            if started:
                scheduler.run()
            raise UserError(refusal) from error
        try:
            scheduler.run()
        finally:
            self.killed = scheduler.killed
            self.elapsed_s = scheduler.timeline.now_s
            self.num_messages, self.num_bytes = fabric.num_messages, fabric.num_bytes
        if scheduler.first_error is not None:
            scheduler.first_error.add_note(f"raised by virtual {scheduler.culprit}")
            raise scheduler.first_error
        return [task.result for task in tasks]
