"""A schedule as text, to look at."""

from __future__ import annotations

from hocket.arrays import Array
from hocket.schedule.operation import Add, Compute, Copy, Gate, Operation, Receive, Send
from hocket.schedule.schedule import Schedule

__all__ = ["render"]


def render(schedule: Schedule) -> str:
    """Return a line for each operation: its name, what it does, and after what.

    For instance `stage 0: send     send 64 bytes to rank 1, tag 2     after start`.
    """
    rows = [
        (operation.name, _what(operation, schedule), _after(operation)) for operation in schedule.operations
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _what(operation: Operation, schedule: Schedule) -> str:
    match operation:
        case Send(data=data, to=to, tag=tag):
            what = f"send {_content(data)} to rank {to}, tag {tag}"
        case Receive(data=data, source=source, tag=tag):
            what = f"receive {_content(data)} from rank {source}, tag {tag}"
        case Compute():
            what = "compute"
        case Add(total=total):
            what = f"add {total.nbytes} bytes"
        case Copy(source=source, clears=clears):
            what = f"{'take' if clears else 'copy'} {source.nbytes} bytes"
        case Gate():
            what = "wait until open"
        case _:
            what = "trigger" if operation.name == schedule.trigger else "nothing"
    return f"{what} (last)" if operation.name in schedule.last else what


def _content(data: Array | None) -> str:
    return "a notice" if data is None else f"{data.nbytes} bytes"


def _after(operation: Operation) -> str:
    if not operation.after:
        return ""
    how = f"{operation.logic.value} of " if len(operation.after) > 1 else ""
    return f"after {how}{', '.join(operation.after)}"
