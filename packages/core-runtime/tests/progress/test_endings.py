"""Endings of runs: failures that reach whoever waits, timeouts that say for whom, threads that end with their peer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from bodies import ENGINES, CalledSum

from hocket.errors import DeadlockError, ExchangeTimeoutError, TransportError
from hocket.launch.joining import join
from hocket.progress import Execution, ProgressEngine, ThreadProgress
from hocket.schedule import Compute, NoOp, Receive, Schedule, recursive_doubling_allreduce
from hocket.transport.peer import Peer
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import VirtualWorld


def _failing(progress: ProgressEngine, peer: Peer) -> Execution:
    def fail(round: int) -> None:
        if round == 1:
            raise ZeroDivisionError("as planned")

    operations = (NoOp("go"), Compute("divide", ("go",), call=fail))
    return Execution(Schedule(operations, ("divide",), trigger="go"), peer, progress, "gradients.0[3]")


_FAILURE = r"rank 0: gradients.0\[3\] failed in round 1 at operation 'divide': ZeroDivisionError: as planned"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failure_reaches_whoever_waits(engine: str) -> None:
    progress = ENGINES[engine]()
    run = _failing(progress, SinglePeer())
    run.start(0).wait()
    with pytest.raises(TransportError, match=_FAILURE):
        run.start(1).wait()
    with pytest.raises(TransportError, match=_FAILURE):
        run.ended(0)
    with pytest.raises(TransportError, match=_FAILURE):
        progress.advance()
    with pytest.raises(TransportError, match=_FAILURE):
        progress.close()


def test_a_failure_that_nobody_asks_for_ends_the_job() -> None:
    def body() -> None:
        peer = join()
        run = _failing(ThreadProgress(), peer)
        run.start(1)
        peer.clock.elapse(100.0)

    with pytest.raises(TransportError, match=_FAILURE + "; all ranks end"):
        VirtualWorld(1).run(body)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wait_ends_with_an_error_that_says_for_whom(engine: str) -> None:
    def body() -> str:
        peer = join()
        progress = ENGINES[engine]()
        run = Execution(
            recursive_doubling_allreduce(peer.rank, 2, np.zeros(3)), peer, progress, "parameters.0[1]"
        )
        if peer.rank == 1:
            peer.clock.elapse(5.0)
            run.start(0).wait()
            progress.close()
            return ""
        with pytest.raises(ExchangeTimeoutError) as error:
            run.start(0).wait(1.0)
        run.wait(0)
        progress.close()
        return str(error.value)

    message = VirtualWorld(2).run(body)[0]
    for part in ("rank 0", "round 0 of parameters.0[1]", "rank 1 ('stage 0: receive')"):
        assert part in message


def test_a_wait_in_vain_is_a_deadlock() -> None:
    def body() -> None:
        peer = join()
        progress = ThreadProgress()
        run = Execution(recursive_doubling_allreduce(peer.rank, 2, np.zeros(3)), peer, progress, "sum")
        if peer.rank == 0:
            run.start(0).wait()
        progress.close()

    with pytest.raises(DeadlockError, match="round 0 of sum"):
        VirtualWorld(2).run(body)


def test_a_peer_is_not_closed_before_its_thread() -> None:
    peer = SinglePeer()
    progress = ThreadProgress()
    CalledSum(peer, progress)
    with pytest.raises(TransportError, match="closed while its threads run: progress"):
        peer.close()
    progress.close()
    peer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hocket progress"]


def test_a_virtual_peer_is_not_closed_before_its_thread() -> None:
    def body() -> None:
        peer = join()
        progress = ThreadProgress()
        CalledSum(peer, progress)
        with pytest.raises(TransportError, match=r"closed before these tasks ended: rank 0 \[progress\]"):
            peer.close()
        progress.close()
        peer.close()

    VirtualWorld(1).run(body)


def test_closing_withdraws_what_is_posted_ahead() -> None:
    def body() -> None:
        peer = join()
        progress = ThreadProgress()
        operations = (NoOp("go"), Receive("get", data=np.zeros(1), source=1 - peer.rank))
        schedule = Schedule(operations, ("get",), trigger="go", persistent=True)
        run = Execution(schedule, peer, progress, "never")
        run.close()
        run.close()
        assert run.num_ended == 0
        progress.close()

    VirtualWorld(2).run(body)
