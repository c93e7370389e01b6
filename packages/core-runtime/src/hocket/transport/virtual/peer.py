"""The endpoint of a virtual rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from hocket.errors import TransportError
from hocket.transport.peer import Clock, Peer
from hocket.transport.request import Request, T
from hocket.transport.status import Status
from hocket.transport.threads import Threads
from hocket.transport.virtual.lane import LaneState, VirtualLane
from hocket.transport.virtual.rendezvous import Call, VirtualRendezvous, name_ranks
from hocket.transport.virtual.request import Attendance, Station, VirtualEvent, VirtualRequest, VirtualWake
from hocket.transport.virtual.timeline import ScheduledThread, ThreadState


class GroupState:
    """The state that the ranks of a group share.

    Attributes:
        ranks: the group, as ranks of the world, in the group's order.
        rendezvous: matches the collectives of the peers themselves.
        sessions: of the group, by number.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.rendezvous = VirtualRendezvous(f"group of {name_ranks(ranks)}", ranks, uses_links=False)
        self.sessions: dict[int, GroupState] = defaultdict(lambda: GroupState(ranks))
        self.attendance = Attendance()


class VirtualPeer(Peer):
    """The endpoint of one rank in a virtual world or in a group of its ranks.

    Used from that rank's tasks only. Messages to a reader name ranks by their rank in the world.
    """

    transport = "virtual"

    def __init__(self, state: GroupState, station: Station, rank: int, timeout_s: float) -> None:
        """Make the endpoint of the group's `rank`, with the default timeout `timeout_s`, in seconds."""
        super().__init__(rank, len(state.ranks))
        self.timeout_s = timeout_s
        self.clock = _Clock(station)
        self.status = _Status(station)
        self.threads = _Threads(self, station)
        self._state = state
        self._station = station
        self._closed = False
        self._num_sessions = 0

    def begin_session(self) -> int:
        self._num_sessions += 1
        return self._num_sessions

    def session(self, number: int) -> VirtualPeer:
        state = self._state.sessions[number]
        station = replace(self._station, attendance=state.attendance)
        peer = VirtualPeer(state, station, self.rank, self.timeout_s)
        peer.progress = self.progress
        return peer

    def leave_session(self, number: int, why: str) -> None:
        scheduler, attendance = self._station.scheduler, self._state.sessions[number].attendance
        attendance.leave(scheduler, f"rank {self._station.rank} {why}")

    def lane(self, name: str, capacity_bytes: int = 0) -> VirtualLane:
        def conclude(_: list[Any]) -> Sequence[LaneState]:
            return [LaneState(name, self._state.ranks)] * self.size

        state = self._join(Call(f"lane {name!r}", None, 0, self._station.network.allgather_seconds, conclude))
        return VirtualLane(state, self._station, self.rank, self.timeout_s)

    def group(self, ranks: Sequence[int]) -> VirtualPeer | None:
        """Return this rank's endpoint among `ranks`, in their order, or None if it is not there; collective.

        Raises:
            TransportError: ranks twice or out of range, or a rank that named another group than its members
                did.
            ExchangeTimeoutError: a rank did not call it in time.
        """
        named = tuple(ranks)
        if len(set(named)) < len(named) or not all(0 <= rank < self.size for rank in named):
            raise TransportError(
                f"rank {self._station.rank}: {list(named)} is not a group of different ranks below {self.size}"
            )
        nbytes = 8 * len(named)
        call = Call("group", named, nbytes, self._station.network.allgather_seconds, self._form_groups)
        state = self._join(call)
        if state is None:
            return None
        peer = VirtualPeer(state, self._station, named.index(self.rank), self.timeout_s)
        peer.progress = self.progress
        return peer

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        def conclude(gathered: list[bytes]) -> Sequence[list[bytes]]:
            return [list(gathered) for _ in gathered]

        seconds = self._station.network.allgather_seconds
        call = Call(what.partition(":")[0], bytes(data), len(data), seconds, conclude, what)
        gathered: list[bytes] = self._join(call, timeout_s)
        return gathered

    def kill(self) -> NoReturn:
        """End this rank at once, as a crash would: it raises RankKilledError here, and at each later use."""
        self._station.scheduler.kill(self._station.rank)

    def abort(self, message: str, code: int = 1) -> NoReturn:
        """End every rank of the world: `World.run` raises TransportError with `message`.

        Nothing is printed, as that error says it once; `code` is unused, as virtual ranks have no exit status.
        """
        self._station.scheduler.end(lambda: TransportError(message))
        raise TransportError(message)

    def close(self) -> None:
        self.threads.check_ended()
        self._closed = True

    def _join(self, call: Call, timeout_s: float | None = None) -> Any:
        if self._closed:
            raise TransportError(
                f"rank {self._station.rank}: {call.what} came after the peer was closed: close it last"
            )
        request = self._state.rendezvous.join(self._station, self.rank, self.timeout_s, call)
        return request.wait(timeout_s)

    def _form_groups(self, named: list[tuple[int, ...]]) -> Sequence[GroupState | None]:
        """Return every rank's new group, None where it is not among the ranks that it named."""
        states: dict[tuple[int, ...], GroupState] = {}
        for caller, ranks in enumerate(named):
            astray = [rank for rank in ranks if named[rank] != ranks]
            if astray:
                world = self._state.ranks
                raise TransportError(
                    f"group: rank {world[caller]} named {[world[rank] for rank in ranks]}, but rank "
                    f"{world[astray[0]]} named {[world[rank] for rank in named[astray[0]]]}: name the same ranks on "
                    "all of them"
                )
            if ranks not in states and ranks:
                states[ranks] = GroupState(tuple(self._state.ranks[rank] for rank in ranks))
        return [states[ranks] if rank in ranks else None for rank, ranks in enumerate(named)]


class _Clock(Clock):
    """The simulation's clock."""

    def __init__(self, station: Station) -> None:
        self._station = station

    def now(self) -> float:
        return self._station.scheduler.timeline.now_s

    def elapse(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass for the calling task; others run meanwhile.

        Raises:
            ValueError: negative, infinite or not a number.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a task can elapse a finite time of at least 0 s, not {seconds}")
        self._station.scheduler.sleep(self._station.rank, seconds)

    def sleep(self, seconds: float) -> None:
        self.elapse(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> bool:
        self._station.scheduler.call_later(self._station.rank, seconds, call)
        return True


class _Threads(Threads):
    """The threads of a virtual rank: tasks of the simulation."""

    shares_process = True

    def __init__(self, peer: VirtualPeer, station: Station) -> None:
        super().__init__(peer)
        self._station = station
        self._tasks: list[ScheduledThread] = []

    def spawn(self, name: str, call: Callable[[], T], stop: Callable[[], None] | None = None) -> Request[T]:
        """Run `call()` in another task of this rank, in virtual time beside the caller.

        The task shares the rank's random states and, in a copy, the caller's context variables (so
        `current_peer()` works). The world ends when all its tasks have ended: end this one, and wait for it. Its
        exception ends the world.

        Args:
            name: its role on this rank, for reports.
            call: the function that it runs.
            stop: not needed, as no task outlives its world.

        Returns:
            A request that is done when `call` has returned, with its result.
        """
        self._station.scheduler.running(self._station.rank)
        # It ends whoever leaves a session.
        station = replace(self._station, attendance=None)
        request = VirtualRequest(station, self._peer.timeout_s, lambda: f"its task {name!r} to end")
        task = self._station.scheduler.spawn(self._station.rank, name, lambda: request.finish(call()))
        self._tasks.append(task)
        return request

    def event(self) -> VirtualEvent:
        return VirtualEvent(self._station, self._peer.timeout_s)

    def wake(self) -> VirtualWake:
        return VirtualWake(self._station)

    def check_ended(self) -> None:
        running = [str(task) for task in self._tasks if task.state is not ThreadState.ENDED]
        if running:
            raise TransportError(f"the peer was closed before these tasks ended: {'; '.join(running)}")


class _Status(Status):
    """The status of every task, known to the simulation."""

    def __init__(self, station: Station) -> None:
        self._station = station

    def describe(self) -> str:
        return self._station.scheduler.timeline.describe()

    def note_step(self, step: int) -> None:
        self._station.scheduler.running(self._station.rank).note = f"step {step}"
