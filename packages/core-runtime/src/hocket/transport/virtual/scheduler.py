"""A scheduler of tasks, one at a time in the order of a virtual clock: discrete-event simulation, with threads.

One task holds the token. Computing takes it no virtual time; when it sleeps, waits or ends, the token goes to the next
task in virtual time. So no action of a task is overtaken by one with an earlier clock. Another seed explores another
interleaving of tasks that are due at the same time; the same seed repeats the run.

The number of threads inside torch and NumPy is left alone: as only one task runs, each may use all cores. Set
it to 1 in tests that compare bits.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from hocket import randomness
from hocket.errors import PeerLostError, RankKilledError, TransportError
from hocket.randomness import RandomState
from hocket.transport.virtual.timeline import ScheduledThread, Signal, ThreadState, Timeline

#: How long `run` waits for its threads after an interrupt, in seconds of the wall's clock.
_GRACE_S = 5.0

#: How long a thread may take to end once its function has, in seconds of the wall's clock.
_SEEING_OUT_S = 5.0

#: Virtual seconds until the other ranks know that one was killed; Open MPI's ULFM takes as long on one host.
_NOTICED_AFTER_S = 0.05


class Scheduler:
    """The clock, the token and the tasks of one run.

    Attributes:
        timeline: the clock and the tasks.
        first_error: the error that ended the run before its tasks had ended, None if none did.
        culprit: a phrase on the origin of `first_error`.
        killed: the ranks that were killed, in the order of their deaths.
    """

    def __init__(self, seed: int) -> None:
        """Make a scheduler without tasks; `seed` decides between tasks that are due at the same time."""
        self.timeline = Timeline(seed)
        self.first_error: BaseException | None = None
        self.culprit = ""
        self.killed: list[int] = []
        self._threads: list[threading.Thread] = []
        self._running: ScheduledThread | None = None
        self._ending: Callable[[], TransportError] | None = None
        self._random_states = _RandomStates()
        self._all_ended = threading.Event()

    # ------------------------------------------------------------------------------------------ from outside

    def run(self) -> None:
        """Run all tasks to their end. The first task's error is in `first_error`.

        An exception that reaches the calling thread meanwhile (Ctrl-C, a test's timeout) ends the tasks and
        is raised when they have ended, or after 5 s if one of them computes on.
        """
        try:
            self._hand_over(self._next_task())
            self._all_ended.wait()
        except BaseException as error:
            cause = f"the run was ended by {type(error).__name__}"
            self.end(lambda: TransportError(cause))
            self._all_ended.wait(_GRACE_S)
            raise
        finally:
            if self._all_ended.is_set():
                for thread in self._threads:
                    _see_out(thread)
            self._random_states.leave()

    def spawn(self, rank: int, name: str, call: Callable[[], object]) -> ScheduledThread:
        """Add a task that is due now and runs `call()` in a thread, within a copy of the caller's context."""
        task = ScheduledThread(rank, name, call)
        live = contextvars.copy_context().run
        thread = threading.Thread(target=live, args=(self._live, task), name=f"virtual {task}", daemon=True)
        thread.start()  # waits for the token
        self._threads.append(thread)
        self.timeline.tasks.append(task)
        self.timeline.make_ready(task, self.timeline.now_s)
        return task

    # ------------------------------------------------------------------- from the task that holds the token

    def running(self, rank: int) -> ScheduledThread:
        """Return the task that holds the token.

        Raises:
            TransportError: the caller is no task of `rank`, or the run is ended.
            RankKilledError: the rank was killed.
        """
        task = self._running
        if rank in self.killed:
            raise RankKilledError(f"virtual rank {rank} was killed")
        if self._ending is not None:
            raise self._ending()
        if task is None or task.rank != rank:
            holder = "none runs" if task is None else f"{task} runs"
            raise TransportError(
                f"rank {rank}'s peer was used outside of that rank's own threads ({holder}): use it only in the "
                "function that the rank runs"
            )
        return task

    def sleep(self, rank: int, seconds: float) -> None:
        """Let `seconds` of virtual time pass for the running task, one of `rank`'s."""
        task = self.running(rank)
        self.timeline.note_change()
        self._sleep(task, seconds)

    def poll(self, rank: int, seconds: float, describe: Callable[[], str]) -> None:
        """Charge the running task, one of `rank`'s, a look at something that may not have happened yet.

        A loop that polls forever is indistinguishable from one that ends, except that nothing else happens: after
        20,000 polls per task the poller sleeps until something does, and if nothing can, that is a deadlock.
        """
        task = self.running(rank)
        if self.timeline.note_poll():
            self.timeline.await_change(task, describe)
            self._switch(task)
        else:
            self._sleep(task, seconds)

    def wait(
        self,
        rank: int,
        signal: Signal,
        describe: Callable[[], str],
        default_timeout_s: float,
        timeout_s: float | None = None,
    ) -> None:
        """Give the token up until `signal` is set.

        Args:
            rank: the waiting task's rank.
            signal: the signal to wait for.
            describe: returns the awaited event and its source; called for errors and reports only.
            default_timeout_s: virtual seconds to wait at most where `timeout_s` is None. It counts as no
                event: tasks that wait with nothing else under way are in a deadlock at once.
            timeout_s: virtual seconds to wait at most.

        Raises:
            ExchangeTimeoutError: not set in time; as `DeadlockError` where nothing can set it any more.
            TransportError: the run is ended.
        """
        task = self.running(rank)
        if signal.is_set:
            return
        longest_s = default_timeout_s if timeout_s is None else timeout_s
        self.timeline.await_signal(task, signal, describe, longest_s, timeout_s is not None)
        self.timeline.note_change()
        self._switch(task)

    def call_later(self, rank: int, seconds: float, call: Callable[[], None]) -> None:
        """Plan `call()`, which may start operations of `rank` as the running task, one of `rank`'s, could."""
        task = self.running(rank)

        def act() -> None:
            if self._ending is None and rank not in self.killed:
                self._running, running = task, self._running
                try:
                    call()
                finally:
                    self._running = running

        self.timeline.call_at(self.timeline.now_s + seconds, act)

    def kill(self, rank: int) -> NoReturn:
        """End all tasks of `rank`, to which the running one belongs; the other ranks notice a little later.

        Until then their messages to it are lost, and they get none of it. Then the run is ended for them: each raises
        PeerLostError, from its wait or from its next use of the transport.
        """
        task = self.running(rank)
        self.killed.append(rank)
        cause = f"{task} was killed"
        self.timeline.interrupt(rank, lambda: RankKilledError(cause))

        def notice() -> None:
            if self._ending is None:
                now_s = self.timeline.now_s
                self.timeline.wake_blocked(lambda task: PeerLostError(f"{task.describe(now_s)}: {cause}"))
                self.end(lambda: PeerLostError(cause))

        self.timeline.call_at(self.timeline.now_s + _NOTICED_AFTER_S, notice)
        raise RankKilledError(cause)

    def end(self, make_error: Callable[[], TransportError]) -> None:
        """End the run: from now on every use of the transport raises `make_error()`."""
        if self._ending is None:
            self._ending = make_error

    # ------------------------------------------------------------------------------------------- the token

    def _sleep(self, task: ScheduledThread, seconds: float) -> None:
        if not self.timeline.pass_alone(seconds):
            self.timeline.make_ready(task, self.timeline.now_s + seconds)
            self._switch(task)

    def _switch(self, task: ScheduledThread) -> None:
        """Hand the token on and return when it is `task`'s turn."""
        following = self._next_task()
        if following is task:
            task.state = ThreadState.RUNNING
        else:
            self._hand_over(following)
            task.token.acquire()
        self._raise_pending(task)

    def _hand_over(self, task: ScheduledThread) -> None:
        self._random_states.enter(task.rank)
        task.state = ThreadState.RUNNING
        self._running = task
        task.token.release()

    def _raise_pending(self, task: ScheduledThread) -> None:
        error, task.error = task.error, None
        if error is not None:
            raise error
        if self._ending is not None:
            raise self._ending()

    def _live(self, task: ScheduledThread) -> None:
        """Run a task's function, then hand the token on for the last time."""
        task.token.acquire()
        try:
            self._raise_pending(task)
            task.result = task.call()
        except BaseException as error:
            if task.rank not in self.killed:
                self._fail(str(task), error)
        task.state = ThreadState.ENDED
        self._running = None
        self.timeline.note_change()
        if all(other.state is ThreadState.ENDED for other in self.timeline.tasks):
            self._all_ended.set()
        else:
            self._hand_over(self._next_task())

    def _fail(self, culprit: str, error: BaseException) -> None:
        if self.first_error is None:
            self.first_error, self.culprit = error, culprit
        cause = f"{culprit} ended with {type(error).__name__}: {error}"
        self.end(lambda: PeerLostError(cause))

    def _next_task(self) -> ScheduledThread:
        """Run the events before the next task, and return that task."""
        while True:
            if self._ending is not None:
                self.timeline.wake_blocked()
            following = self.timeline.advance()
            if isinstance(following, ScheduledThread):
                return following
            try:
                following()
            except BaseException as error:
                # It happens on the thread of any task: not that one's fault, and no reason to lose the token.
                self._fail("an event of the simulation", error)


def _see_out(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread, not only Python.

    torch frees a thread's data in between, as the rest of a failed backward's graph, and takes the interpreter's lock
    for it. If the interpreter ends first, that ends the process by SIGABRT.
    """
    thread.join()
    there, until = f"/proc/self/task/{thread.native_id}", time.monotonic() + _SEEING_OUT_S
    while os.path.exists(there) and time.monotonic() < until:
        time.sleep(0.0001)


class _RandomStates:
    """The global random states of each rank, swapped as the token moves.

    torch's default CPU generator (once torch is imported), NumPy's legacy global state and `random`'s; each rank starts
    with those of the caller of `World.run`. Without the swap a model with dropout would draw in the order in which the
    scheduler runs the ranks. CUDA generators are not swapped: draw on the CPU, or from a generator of your own, where
    virtual ranks share a GPU.
    """

    def __init__(self) -> None:
        self._outside = randomness.read()
        self._by_rank: dict[int, RandomState] = {}
        self._loaded = self._outside
        self._rank: int | None = None

    def enter(self, rank: int) -> None:
        """Save the states of the rank that held the token and load `rank`'s."""
        if rank == self._rank:
            return
        current = randomness.read(self._loaded)
        if self._rank is not None:
            self._by_rank[self._rank] = current
        self._load(self._by_rank.get(rank, self._outside), current)
        self._rank = rank

    def leave(self) -> None:
        """Restore the states of the caller of `World.run`."""
        if self._rank is not None:
            self._load(self._outside, randomness.read(self._loaded))
            self._rank = None

    def _load(self, state: RandomState, current: RandomState) -> None:
        randomness.write(state, current)
        self._loaded = state
