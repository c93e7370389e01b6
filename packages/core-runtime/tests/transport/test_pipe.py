"""Pipes in shared memory, by both ends in one process: the stream against the bytes that were written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hocket.transport.tcp.pipe import Pipe, open_pipes, room_bytes


def _pair(ranks: int = 2) -> tuple[Pipe, Pipe, list[str]]:
    """Return the pipes of ranks 0 and 1 to each other, and the wake-ups so far."""
    woken: list[str] = []
    rooms = {rank: np.zeros(room_bytes(ranks - 1), np.uint8) for rank in range(ranks)}

    def pipe(rank: int, other: int) -> Pipe:
        _, pipes = open_pipes(
            rank, range(ranks), rooms, lambda to: lambda: woken.append(f"{rank} wakes {to}")
        )
        return pipes[other]

    return pipe(0, 1), pipe(1, 0), woken


@pytest.mark.parametrize("ranks", [2, 5, 40, 400])
def test_bytes_arrive_in_order_both_ways(ranks: int) -> None:
    draw = random.Random(ranks)
    one, other, _ = _pair(ranks)
    streams = {one: bytearray(), other: bytearray()}
    received = {one: bytearray(), other: bytearray()}
    room = memoryview(bytearray(1 << 18))
    for _ in range(300):
        end = draw.choice([one, other])
        if draw.random() < 0.5:
            parts = [draw.randbytes(draw.choice([1, 36, 5000, 200_000])) for _ in range(2)]
            if end.has_room():
                count = end.sendmsg([memoryview(part) for part in parts])
                assert count > 0
                streams[end] += b"".join(parts)[:count]
            else:
                with pytest.raises(BlockingIOError):
                    end.sendmsg([memoryview(part) for part in parts])
        elif end.has_more():
            count = end.recv_into(room[: draw.choice([1, 36, 70_000, 1 << 18])])
            assert count > 0
            received[end] += room[:count]
    for end in (one, other):
        while end.has_more():
            received[end] += room[: end.recv_into(room)]
        with pytest.raises(BlockingIOError):
            end.recv_into(room)
    assert (received[other], received[one]) == (streams[one], streams[other])
    assert min(map(len, streams.values())) > 10_000


def test_inboxes_of_a_rank_lie_apart() -> None:
    ranks = [2, 3, 7]
    rooms = {rank: np.zeros(room_bytes(2), np.uint8) for rank in ranks}
    pipes = {rank: open_pipes(rank, ranks, rooms, lambda to: lambda: None)[1] for rank in ranks}
    for rank in ranks:
        for other, pipe in pipes[rank].items():
            pipe.sendmsg([memoryview(bytes([rank, other]) * 1000)])
    room = memoryview(bytearray(1 << 14))
    for rank in ranks:
        for other, pipe in pipes[rank].items():
            assert room[: pipe.recv_into(room)] == bytes([other, rank]) * 1000


def test_a_sleeping_rank_is_woken_once_a_nap() -> None:
    woken: list[int] = []
    rooms = {rank: np.zeros(room_bytes(1), np.uint8) for rank in range(2)}
    _, [pipe] = (
        (given := open_pipes(0, range(2), rooms, lambda to: lambda: woken.append(to)))[0],
        [given[1][1]],
    )
    naps, _ = open_pipes(1, range(2), rooms, lambda to: lambda: None)

    def wakes() -> bool:
        before = len(woken)
        pipe.sendmsg([memoryview(b"x")])
        return len(woken) > before

    assert not wakes()
    naps.begin()
    assert wakes()
    assert not wakes()
    naps.begin()  # another thread, which the wake-up may not have reached
    assert wakes()
    naps.end(others=True)
    assert wakes()
    assert not wakes()
    naps.end(others=False)
    assert not wakes()


def test_a_sender_that_waits_for_room_is_woken() -> None:
    woken: list[int] = []
    rooms = {rank: np.zeros(room_bytes(1), np.uint8) for rank in range(2)}
    naps, sending = open_pipes(0, range(2), rooms, lambda to: lambda: None)
    _, receiving = open_pipes(1, range(2), rooms, lambda to: lambda: woken.append(to))
    data, room = memoryview(bytes(1 << 17)), memoryview(bytearray(1 << 16))
    while sending[1].has_room():
        sending[1].sendmsg([data])
    naps.begin()
    receiving[0].recv_into(room)
    assert not woken  # it has not asked
    while sending[1].has_room():
        sending[1].sendmsg([data])
    with pytest.raises(BlockingIOError):
        sending[1].sendmsg([data])
    receiving[0].recv_into(room)
    assert woken == [0]
