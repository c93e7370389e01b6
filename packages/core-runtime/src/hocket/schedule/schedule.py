"""A collective as data: a directed acyclic graph of operations.

Source: eager-SGD (Li et al.), sec. 4.1.1: schedules, consumable operations, internal and external activation,
persistent schedules.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hocket.errors import HocketError, suggest
from hocket.schedule.operations import Add, NoOp, Operation, Receive, Send


class ScheduleError(HocketError):
    """An error about operations that form no schedule."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The operations of one rank in every round of a collective.

    An execution is armed, fires operations that become ready, and ends when the operations of `last` are done and no
    fired one is still under way. Operations that have not fired by then never do.

    Attributes:
        operations: in the order in which those that are ready together fire.
        last: the operations whose end ends an execution. In the schedules that this package builds the data is final
            then, and may be read; it may be written once the execution has ended, as sends can still be under way.
        trigger: a NoOp without dependencies that the application fires (internal activation); None where an execution
            starts by itself.
        persistent: whether the end of a round arms the next one at once, so that this rank can be pulled through
            rounds without help from the application (external activation). Otherwise the application's trigger
            arms it.
        num_tags: the tags of its messages are below this; the same on every rank, whatever its own part.

    Raises:
        ScheduleError: duplicate names, dependencies that do not exist or go in circles, a trigger that is none, tags
            out of range or used twice between two ranks, buffers that are not contiguous or do not fit each other, or a
            persistent schedule that would start its rounds itself.
    """

    operations: tuple[Operation, ...]
    last: tuple[str, ...]
    trigger: str | None = None
    persistent: bool = False
    num_tags: int = 1

    def __post_init__(self) -> None:
        self._check_names()
        self._check_order()
        self._check_start()
        self._check_tags()
        self._check_buffers()

    def _check_names(self) -> None:
        names = [operation.name for operation in self.operations]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ScheduleError(f"more than one operation is named {twice[0]!r}")
        for operation in self.operations:
            for name in operation.after:
                if name not in names:
                    raise ScheduleError(
                        f"operation {operation.name!r} comes after {name!r}, which does not exist."
                        + suggest(name, names)
                    )
        for name in (*self.last, *([] if self.trigger is None else [self.trigger])):
            if name not in names:
                raise ScheduleError(
                    f"{name!r}, named as last or trigger, does not exist.{suggest(name, names)}"
                )
        if not self.last:
            raise ScheduleError("no operation is named as last, so an execution would never end")

    def _check_order(self) -> None:
        graph = {operation.name: operation.after for operation in self.operations}
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            # As (a, b): b comes after a.
            raise ScheduleError(
                f"operations depend on each other in a circle: {' -> '.join(error.args[1])}"
            ) from None

    def _check_start(self) -> None:
        for operation in self.operations:
            if operation.name == self.trigger and not (isinstance(operation, NoOp) and not operation.after):
                raise ScheduleError(
                    f"the trigger {operation.name!r} must be a NoOp that comes after no other operation"
                )
        if self.persistent and not any(isinstance(o, Receive) for o in self.operations) and not self.trigger:
            raise ScheduleError(
                "a persistent schedule without trigger and without receives would never pause: give it one of them"
            )

    def _check_tags(self) -> None:
        messages: set[tuple[type, int, int]] = set()
        for operation in self.operations:
            if not isinstance(operation, Send | Receive):
                continue
            if not 0 <= operation.tag < self.num_tags:
                raise ScheduleError(
                    f"operation {operation.name!r} has tag {operation.tag}, but num_tags is {self.num_tags}: tags are "
                    "0 to num_tags - 1"
                )
            other = operation.to if isinstance(operation, Send) else operation.source
            message = (type(operation), other, operation.tag)
            if message in messages:
                raise ScheduleError(
                    f"operation {operation.name!r}: another operation exchanges a message with rank {other} under "
                    "the same tag: give it another tag"
                )
            messages.add(message)

    def _check_buffers(self) -> None:
        for operation in self.operations:
            where = f"operation {operation.name!r}"
            if isinstance(operation, Add):
                kinds = [f"{array.dtype}{list(array.shape)}" for array in (operation.total, operation.addend)]
                if kinds[0] != kinds[1]:
                    raise ScheduleError(
                        f"{where}: its arrays have different types, {' and '.join(kinds)}: give both one type"
                    )
            if isinstance(operation, Send | Receive) and operation.data is not None:
                if not operation.data.flags.c_contiguous:
                    raise ScheduleError(f"{where}: its data must be C-contiguous")
                if isinstance(operation, Receive) and not operation.data.flags.writeable:
                    raise ScheduleError(
                        f"{where}: the array that it writes is read-only: give a writable one"
                    )


def chain(*parts: tuple[str, Schedule], persistent: bool = False) -> Schedule:
    """Return one schedule that runs one part after the other.

    Operations of a part without dependencies, its trigger too, wait for the last operations of the part before; but its
    receives without dependencies stay so and are pre-posted. So no other operation may use their buffers before they
    are done, and later parts may read the last data that a part sends, but not write it.

    Args:
        parts: each with a name, which goes before the names of its operations with a dot between.
        persistent: see `Schedule`.

    Returns:
        A schedule whose trigger is the first part's, and whose tags are the parts' in turn.
    """
    operations: list[Operation] = []
    previous: tuple[str, ...] = ()
    num_tags = 0
    for part, schedule in parts:
        for operation in schedule.operations:
            operations.append(_moved(operation, part, previous, num_tags))
        previous = tuple(_prefixed(part, schedule.last))
        num_tags += schedule.num_tags
    first, schedule = parts[0]
    trigger = None if schedule.trigger is None else f"{first}.{schedule.trigger}"
    return Schedule(tuple(operations), previous, trigger, persistent, num_tags)


def _prefixed(part: str, names: Iterable[str]) -> list[str]:
    return [f"{part}.{name}" for name in names]


def _moved(operation: Operation, part: str, previous: tuple[str, ...], num_tags: int) -> Operation:
    """Return `operation` of a part of a chain whose earlier parts end with `previous` and use `num_tags` tags."""
    after = tuple(_prefixed(part, operation.after))
    if not after and not isinstance(operation, Receive):
        after = previous
    moved = replace(operation, name=f"{part}.{operation.name}", after=after)
    if isinstance(moved, Send | Receive):
        moved = replace(moved, tag=moved.tag + num_tags)
    return moved
