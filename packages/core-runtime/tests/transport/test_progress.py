"""The unfinished operations of a rank: who advances them, and what becomes of those that were dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hocket.errors import TransportError
from hocket.launch.joining import join
from hocket.transport.pending import Progress
from hocket.transport.virtual import VirtualWorld
from hocket.transport.wrapper import WrapperPeer


class Counted:
    """Done at the last of a few looks."""

    def __init__(self, looks: int, at_look: Callable[[], object] = lambda: None) -> None:
        self.left = looks
        self.at_look = at_look

    def advance(self) -> bool:
        self.left -= 1
        self.at_look()
        return self.left <= 0


def test_what_is_added_is_advanced_until_it_is_done() -> None:
    progress = Progress()
    at_once, soon, late = Counted(1), Counted(2), Counted(3)
    for operation in (at_once, soon, late):
        progress.add(operation.advance)
    assert not progress.is_only(late.advance)
    progress.advance()
    assert progress.is_only(late.advance)
    progress.advance()
    progress.advance()
    assert not progress.busy
    assert [at_once.left, soon.left, late.left] == [0, 0, 0]


def test_what_is_advanced_may_add_another_and_be_added_again() -> None:
    progress = Progress()
    another = Counted(3)

    def add_another() -> None:
        if another.left == 3:
            progress.add(another.advance)

    first = Counted(3, add_another)
    progress.add(first.advance)
    progress.add(first.advance)
    progress.advance()
    assert (first.left, another.left) == (0, 1)
    progress.advance()
    assert not progress.busy


def test_an_operation_that_fails_loses_no_other() -> None:
    def fail() -> None:
        raise TransportError("as planned")

    progress = Progress()
    failing, other = Counted(9), Counted(2)
    progress.add(failing.advance)
    progress.add(other.advance)
    failing.at_look = fail
    with pytest.raises(TransportError, match="as planned"):
        progress.advance()
    failing.at_look = lambda: None
    progress.advance()
    assert other.left == 0


def test_one_thread_advances_at_a_time_and_no_other_waits_for_it() -> None:
    progress = Progress()

    def look_from_another_thread() -> None:
        thread = threading.Thread(target=progress.advance)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        progress.advance()  # nor does it advance itself from within

    operation = Counted(3)
    progress.add(operation.advance)
    operation.at_look = look_from_another_thread
    progress.advance()
    assert operation.left == 1


def test_what_was_dropped_is_looked_at_in_turns() -> None:
    progress = Progress()
    dropped = [Counted(2), Counted(1), Counted(1)]
    for operation in dropped:
        progress.keep(operation.advance)
    for expected in ([1, 1, 1], [1, 0, 1]):
        progress.advance()
        assert [operation.left for operation in dropped] == expected
    progress.begin_message()  # who begins messages and waits for none has them looked at, too
    assert [operation.left for operation in dropped] == [1, 0, 0]
    assert progress.busy
    progress.advance()
    assert not progress.busy


def test_messages_move_while_there_are_any() -> None:
    looks: list[int] = []
    progress = Progress(lambda: looks.append(1))
    progress.move_messages()
    progress.begin_message()
    progress.move_messages()
    assert len(looks) == 1
    progress.end_message()
    progress.move_messages()
    assert len(looks) == 1


def test_a_rank_has_one_in_all_of_its_groups() -> None:
    def body() -> Progress:
        peer = join()
        group = peer.group([0, 1, 2])
        assert group is not None
        assert group.progress is peer.progress
        assert WrapperPeer(group).progress is peer.progress
        return peer.progress

    assert len(set(VirtualWorld(3).run(body))) == 3
