"""A schedule as a program: one vector of numbers that compiled code carries out.

Its layout is that of `hocket.kernels.program`, where it is read and written.
"""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.kernels import program as layout
from hocket.schedule.operation import Add, Copy, Logic, NoOp, Operation, Receive, Send
from hocket.schedule.schedule import Schedule
from hocket.transport.signals import Connection

__all__ = ["build_program"]


def build_program(schedule: Schedule, rank: int, size: int, connection: Connection) -> Array:
    """Return the program of a schedule, before its first round.

    What a connection's bells can carry is sent and received by the program; other messages, computations and gates are
    handed to Python.

    Args:
        schedule: this rank's; its buffers outlive the program.
        rank: this rank.
        size: how many ranks.
        connection: to their bells.

    Returns:
        [words] int64.
    """
    layout.prepare()
    operations = schedule.operations
    index = {operation.name: i for i, operation in enumerate(operations)}
    dependents: list[list[int]] = [[] for _ in operations]
    for i, operation in enumerate(operations):
        for name in operation.after:
            dependents[index[name]].append(i)

    places = layout.HEADER + layout.FIELDS * len(operations)
    queue = places + size * schedule.num_tags
    end = queue + len(operations)
    program = np.zeros(end + sum(map(len, dependents)), np.int64)
    program[layout.PLACES], program[layout.NUM_SOURCES], program[layout.NUM_TAGS] = (
        places,
        size,
        schedule.num_tags,
    )
    program[layout.QUEUE] = queue
    program[layout.NUM_OPERATIONS] = len(operations)
    program[layout.NUM_LAST] = len(set(schedule.last))
    program[layout.TRIGGER] = -1 if schedule.trigger is None else index[schedule.trigger]
    program[layout.PERSISTENT] = schedule.persistent
    program[layout.RANK] = rank

    program[places:queue] = -1
    for i, operation in enumerate(operations):
        record = program[layout.HEADER + i * layout.FIELDS :][: layout.FIELDS]
        record[layout.NEEDED] = _num_needed(operation)
        record[layout.IS_LAST] = operation.name in schedule.last
        record[layout.DEPENDENTS], record[layout.NUM_DEPENDENTS] = end, len(dependents[i])
        program[end : end + len(dependents[i])] = dependents[i]
        end += len(dependents[i])
        _write_kind(record, operation, connection)
        if isinstance(operation, Receive) and record[layout.KIND] != layout.HANDED:
            program[places + operation.source * schedule.num_tags + operation.tag] = i
    return program


def _num_needed(operation: Operation) -> int:
    """Return how many of its dependencies must be done before an operation fires."""
    if operation.logic is Logic.ANY:
        return min(len(operation.after), 1)
    return len(operation.after)


def _write_kind(record: Array, operation: Operation, connection: Connection) -> None:
    """Write what an operation does, and on what."""
    kind = layout.HANDED
    match operation:
        case NoOp():
            kind = layout.NOTHING
        case Send(to=to, data=data, tag=tag):
            bell = connection.bell(to)
            if bell is not None and _nbytes(data) <= connection.largest_bytes:
                kind = layout.RING
                record[layout.DESCRIPTOR], record[layout.KEY] = bell
                record[layout.TAG] = tag
                _write_data(record, layout.FROM, data)
        case Receive(data=None):
            kind = layout.HEAR
            record[layout.HEARD] = -1
        case Receive(source=source, data=data):
            if connection.hears(source) and _nbytes(data) <= connection.largest_bytes:
                kind = layout.EXPECT
                record[layout.EXPECTED] = -1
                _write_data(record, layout.TO, data)
        case Add(total=total, addend=addend):
            if total.dtype.isnative and total.dtype.name in layout.ADDABLE:
                kind = layout.ADD
                record[layout.DTYPE] = layout.ADDABLE[total.dtype.name]
                _write_data(record, layout.TO, total)
                _write_data(record, layout.FROM, addend)
        case Copy(source=source, to=to):
            kind = layout.COPY
            _write_data(record, layout.FROM, source)
            _write_data(record, layout.TO, to)
            record[layout.LOCK] = 0 if operation.lock is None else operation.lock.address
            record[layout.CLEARS] = operation.clears
            record[layout.STAMP] = 0 if operation.stamp is None else operation.stamp.ctypes.data
    record[layout.KIND] = kind


def _write_data(record: Array, field: int, data: Array | None) -> None:
    record[field] = 0 if data is None else data.ctypes.data
    record[layout.NBYTES] = _nbytes(data)


def _nbytes(data: Array | None) -> int:
    return 0 if data is None else data.nbytes
