"""Collectives made of messages: schedules for repeated use on the same buffers, as lanes carry them out."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from hocket.arrays import Array, as_bytes
from hocket.schedule.firing import Firing
from hocket.schedule.operations import Receive, Send
from hocket.schedule.schedule import Schedule

#: The data of a message that has none.
NOTHING = np.empty(0, np.uint8)

# A lane keeps this many programs, with their buffers: a session's exchanges use the same ones in every step.
_MOST_PROGRAMS = 4


class Program:
    """A schedule of messages for repeated use on the same buffers.

    Args:
        what: the operation.
        schedule: this rank's part.
        data: the buffer that it works on.

    Attributes:
        messages: the bytes of each operation's message; empty for others.
        call: a word on the operation and its data, equal on all ranks.
        in_use: whether a call carries it out.
    """

    def __init__(self, what: str, schedule: Schedule, data: Array) -> None:
        self.operations = schedule.operations
        self.messages = [
            as_bytes(op.data) if isinstance(op, Send | Receive) and op.data is not None else NOTHING
            for op in schedule.operations
        ]
        self.num_tags = schedule.num_tags
        self.firing = Firing(schedule)
        self._trigger = next(i for i, op in enumerate(schedule.operations) if op.name == schedule.trigger)
        self.call = zlib.crc32(f"{what} {data.dtype}[{data.size}]".encode())
        self.data = data
        self.in_use = False

    def begin(self) -> None:
        """Fire the operations that wait for no other."""
        self.in_use = True
        self.firing.arm()
        self.firing.finish(self._trigger)

    @property
    def over(self) -> bool:
        """Tell whether all operations are done."""
        return len(self.firing.done) == len(self.operations)


def program_on(
    kept: dict[tuple[object, ...], Program],
    what: str,
    data: Array,
    build: Callable[[Array], Schedule],
    *,
    copies: bool = False,
) -> Program:
    """Return a program of a lane that is not in use, if possible an earlier one for the same memory.

    Args:
        kept: the lane's programs, which this adds to.
        what: the operation.
        data: the buffer.
        build: makes the schedule.
        copies: whether it works on a copy of `data`, which stays unchanged.
    """
    known = (what, data.__array_interface__["data"][0], data.nbytes, data.dtype)
    program = kept.get(known)
    if program is None or program.in_use:
        work = np.empty_like(data) if copies else data
        program = Program(what, build(work), work)
        while len(kept) >= _MOST_PROGRAMS:
            del kept[next(iter(kept))]
        kept[known] = program
    if copies:
        np.copyto(program.data, data)
    return program
