"""Requests made of requests: what follows one, and what waits for several."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.errors import ExchangeTimeoutError
from hocket.launch.joining import join
from hocket.transport.request import Finished, FunctionRequest, Request
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import VirtualWorld


class Third(Request[int]):
    """Done at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self, timeout_s: float | None = None) -> int:
        self.looks = 3
        return self.looks

    @property
    def result(self) -> int:
        return self.looks


def test_what_follows_is_done_once_and_gives_the_result() -> None:
    calls: list[int] = []

    def act(result: int) -> str:
        calls.append(result)
        return f"after {result}"

    polled, waited = Third().then(act), Third().then(act)
    assert [polled.done() for _ in range(4)] == [False, False, True, True]
    assert (polled.result, polled.wait()) == ("after 3", "after 3")
    assert (waited.wait(), waited.done(), waited.result) == ("after 3", True, "after 3")
    assert calls == [3, 3]


def test_what_follows_happens_once_where_a_wait_looks_at_it_too() -> None:
    """As a wait between hosts does, which looks what is over, to begin what waits for its turn."""

    class Looking(Third):
        def wait(self, timeout_s: float | None = None) -> int:
            while not followed.done():
                pass
            return self.looks

    calls: list[int] = []
    followed: Request = Looking().then(calls.append)
    followed.wait()
    assert calls == [3]


def test_what_follows_and_fails_says_so_to_each_caller() -> None:
    """As a look within another's wait may have found it first."""

    def fail(result: int) -> None:
        raise ZeroDivisionError("as planned")

    polled, waited = Finished(1).then(fail), Finished(1).then(fail)
    for ask in (polled.done, polled.wait, polled.done, waited.wait, waited.done):
        with pytest.raises(ZeroDivisionError):
            ask()


def test_several_are_done_when_all_are() -> None:
    requests = [Third(), Finished(7), Third()]
    together = Request.all_of(requests)
    assert [together.done() for _ in range(4)] == [False, False, True, True]
    assert together.result == [3, 7, 3]
    assert [request.looks for request in requests if isinstance(request, Third)] == [3, 3], (
        "only looked at until done"
    )
    assert Request.all_of([Third(), Third()]).then(sum).wait() == 6
    assert Request.all_of([]).done()
    assert Request.all_of([]).wait() == []


def test_receives_are_withdrawn_together() -> None:
    lane, data = SinglePeer().lane("a"), np.zeros(1)
    request = Request.all_of(lane.irecv(data, 0, round) for round in range(2)).then(lambda _: None)
    request.withdraw()
    lane.isend(np.ones(1), 0, 0)
    assert request.done()  # as on the other transports: nothing is awaited any more
    assert not data.any()


def test_a_wait_for_several_ends_with_a_timeout() -> None:
    def body() -> None:
        peer, data = join(), np.zeros(1)
        lane = peer.lane("a")
        with pytest.raises(ExchangeTimeoutError, match="lane 'a', since 1 s"):
            Request.all_of([Finished(), lane.irecv(data, 1 - peer.rank, 0)]).wait(1.0)
        assert peer.clock.now() < 2.0

    VirtualWorld(2).run(body)


def test_a_request_of_functions_looks_waits_and_gives_the_result() -> None:
    given: list[float | None] = []
    request = FunctionRequest(lambda: bool(given), given.append, lambda: len(given))
    assert not request.done()
    assert request.wait(2.5) == 1
    assert (given, request.done(), request.result) == ([2.5], True, 1)
    with pytest.raises(TypeError, match="only a receive can be withdrawn"):
        request.withdraw()


def test_a_receive_from_oneself_is_filled_in_order_and_can_be_withdrawn() -> None:
    lane = SinglePeer().lane("self")
    first, second, third = (np.zeros(2) for _ in range(3))
    receives = [lane.irecv(buffer, 0, 7) for buffer in (first, second, third)]
    receives[1].withdraw()
    lane.isend(np.full(2, 1.0), 0, 7)
    lane.isend(np.full(2, 2.0), 0, 7)
    assert [request.done() for request in receives] == [True, True, True]
    assert [first.tolist(), second.tolist(), third.tolist()] == [[1, 1], [0, 0], [2, 2]]
    with pytest.raises(ExchangeTimeoutError, match=r"rank 0 waits for itself in self, round 8"):
        lane.irecv(first, 0, 8).wait()
