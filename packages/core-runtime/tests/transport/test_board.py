"""The memory that a host's ranks show each other on their status board."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hocket.transport.host import StatusBoard, status

HOSTS = ["a", "b", "a", "a", "b"]


def test_the_room_of_each_rank_is_for_its_hosts_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for the ranks; a host's ranks see each other's memory, and no other's."""
    this, together = threading.local(), threading.Barrier(len(HOSTS))
    gathered: list[Any] = [None] * len(HOSTS)
    monkeypatch.setattr(status, "_host", lambda: HOSTS[this.rank])

    def allgather(value: object) -> list[Any]:
        gathered[this.rank] = value
        together.wait(10)
        everyones = list(gathered)
        together.wait(10)
        return everyones

    def open_board(rank: int) -> StatusBoard:
        this.rank = rank
        return StatusBoard(rank, allgather, lambda others: 1000 * others)

    with ThreadPoolExecutor(len(HOSTS)) as pool:
        boards = list(pool.map(open_board, range(len(HOSTS))))
    for rank, board in enumerate(boards):
        here = [other for other, host in enumerate(HOSTS) if host == HOSTS[rank]]
        assert board.ranks == here
        assert sorted(board.rooms) == here
        assert {len(room) for room in board.rooms.values()} == {1000 * (len(here) - 1)}
        board.rooms[rank][:] = rank + 1
        assert all(boards[other].rooms[rank].tolist() == board.rooms[rank].tolist() for other in here)
