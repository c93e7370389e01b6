"""Ranks that find the others of their job in a store that other jobs, or earlier attempts, use too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hocket.errors import UserError
from hocket.launch import joining
from hocket.transport.meeting import Rendezvous, attempt
from hocket.transport.meeting.attempt import Member, join_attempt
from hocket.transport.meeting.store import StoreRanks, serve_store
from hocket.transport.single import SinglePeer

LONGEST_S = 20.0
A, B = Member("", 2, "train.py A", "one"), Member("", 2, "train.py B", "one")

Join = Callable[..., "Future[StoreRanks]"]


@pytest.fixture
def server() -> TCPStore:
    return serve_store()


@pytest.fixture
def join(server: TCPStore) -> Iterator[Join]:
    """Return a function that has a rank join, in a thread of its own."""
    with ThreadPoolExecutor() as threads:

        def begin(rank: int, member: Member = A, *, lasts: bool = False) -> Future[StoreRanks]:
            place = Rendezvous(
                rank,
                member.size,
                "127.0.0.1",
                server.port,
                "job",
                timeout_s=LONGEST_S,
                lasts=lasts,
                job=member.job,
            )
            store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)
            return threads.submit(join_attempt, store, place, member)

        yield begin


def refusal(joining: Future[StoreRanks]) -> str:
    error = joining.exception(LONGEST_S)
    assert isinstance(error, UserError), error
    return str(error)


def gathered(*joined: Future[StoreRanks]) -> list[list[int]]:
    """Return what each rank hears, which sends its number."""
    ranks = [each.result(LONGEST_S) for each in joined]
    heard: list[list[int]] = [[] for _ in ranks]

    def gather(number: int) -> None:
        heard[number] = ranks[number].gather(number)

    threads = [threading.Thread(target=gather, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    return heard


def test_ranks_of_a_job_meet(join: Join) -> None:
    assert gathered(join(0), join(1)) == [[0, 1], [0, 1]]


def test_a_rank_of_another_job_that_comes_first_is_not_taken(join: Join) -> None:
    """Its own rank 0 found the port taken; then the first job's rank 1 comes."""
    first, stranger = join(0, A), join(1, B)
    time.sleep(0.5)
    late = join(1, A)
    for each in (first, stranger, late):
        assert "ranks of two jobs use the store at 127.0.0.1 port " in refusal(each)
        assert "give each job a MASTER_PORT of its own" in refusal(each)


def test_a_rank_that_comes_later_leaves_the_job_alone(join: Join) -> None:
    first, second = join(0, A), join(1, A)
    first.result(LONGEST_S), second.result(LONGEST_S)
    assert "a second process is rank 1 (train.py B on one)" in refusal(join(1, B))
    assert gathered(first, second) == [[0, 1], [0, 1]]


def test_jobs_that_launchers_name_are_told_apart_at_once(join: Join) -> None:
    begun_s = time.monotonic()
    first, stranger = join(0, A._replace(job="7.0")), join(1, A._replace(job="8.0"))
    told = refusal(first)
    assert "rank 0 of 2 is job 7.0, `train.py A` on one, and rank 1 of 2 is job 8.0" in told
    assert refusal(stranger) == told
    assert time.monotonic() - begun_s < attempt._SUSPICION_S


def test_one_job_may_have_several_programs(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_SUSPICION_S", 0.5)
    assert gathered(join(0, A), join(1, B)) == [[0, 1], [0, 1]]


class TestAStoreThatLasts:
    """A launcher's: it starts ranks again, and hosts count apart how often."""

    def test_ranks_meet_again_whoever_comes_first(self, join: Join) -> None:
        gathered(join(0, lasts=True), join(1, lasts=True))
        second = join(1, lasts=True)
        time.sleep(0.5)
        assert gathered(join(0, lasts=True), second) == [[0, 1], [0, 1]]

    def test_a_rank_that_found_an_attempt_without_its_rank_0_goes_on_to_the_next(
        self, server: TCPStore, join: Join
    ) -> None:
        TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False).set(
            "attempt", "of a dead rank 0"
        )
        second = join(1, lasts=True)
        time.sleep(0.5)
        assert not second.done()
        assert gathered(join(0, lasts=True), second) == [[0, 1], [0, 1]]


def test_a_process_that_gets_another_jobs_variables_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "a"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    peer = SinglePeer()
    peer.transport = "torch"
    found = joining.launched()
    assert found is not None
    monkeypatch.setattr(joining, "_joined", peer)
    monkeypatch.setattr(joining, "_place", joining._place_of(found, peer))
    assert joining.join() is peer
    monkeypatch.setenv("MASTER_PORT", "2")
    with pytest.raises(
        UserError, match=r"joined a job as rank 0 of 2 at a port 1, .* now says rank 0 of 2 at a port 2"
    ):
        joining.join()
