"""Performs a program on virtual ranks, and holds what the ranks have seen against what they had to see."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import hocket
from hocket.errors import DeadlockError, HocketError, NonFiniteError
from hocket.session.save.save_point import SIGNALS
from machine.moves import Attach, Epoch, Move, Poison, Program, Refuse, Save, Signal, Start, Swap
from machine.records import TOLERANCE, Records, difference
from machine.refusals import REFUSALS
from machine.script import Saved, Script
from machine.truth import Truth


class WrongError(AssertionError):
    """A session that has done something else than it has to."""


def check(program: Program) -> None:
    """Perform a program.

    Raises:
        WrongError: names the move, what came of it, and the program, to be pasted into `check`.
    """
    truth = Truth()
    newest: Saved | None = None
    with TemporaryDirectory() as folder:
        for begin, job in _jobs(program):
            assert isinstance(job[0], Start)
            saved = newest
            records = [Records() for _ in range(job[0].ranks)]
            error = _run(job, begin, Path(folder), records, saved)
            # After the sessions, so that errors of theirs come first.
            for number, move in enumerate(job, begin):
                if isinstance(move, Signal):
                    truth.stopped = _stopped(records)
                if not isinstance(move, Poison | Refuse):
                    truth.perform(number, move)
            newest = _newest(job, begin, saved, truth.stopped)
            # What LBFGS divides by is a difference that may be small.
            tolerance = 1e-3 if job[0].optimizer == "lbfgs" else TOLERANCE
            _compare(program, records, truth.records, error, tolerance)
            if error is not None:
                _judge(program, records, error)
            elif isinstance(job[-1], Poison | Refuse):
                raise WrongError(_told(program, len(program) - 1, "was not refused"))


def _jobs(program: Program) -> Iterator[tuple[int, list[Move]]]:
    """Yield jobs, and where they begin."""
    begins = [number for number, move in enumerate(program) if isinstance(move, Start)]
    for begin, end in zip(begins, [*begins[1:], len(program)], strict=True):
        yield begin, program[begin:end]


def _newest(job: Sequence[Move], begin: int, before: Saved | None, stopped: int | None) -> Saved | None:
    """Return the newest checkpoint after a job."""
    newest, begun = before, 0
    for number, move in enumerate(job, begin):
        if isinstance(move, Attach):
            begun = newest.begun if move.loads and newest is not None else number
        elif isinstance(move, Save) or (isinstance(move, Swap) and move.then == "save"):
            newest = Saved(begun, None)
        elif isinstance(move, Epoch) and move.saves:
            # One that goes on with the newest saves nothing, and leaves it what it is.
            newest = Saved(begun, move)
        elif isinstance(move, Signal):
            newest = Saved(begun, replace(move.epoch, stops=stopped))
    return newest


def _stopped(records: Sequence[Records]) -> int | None:
    """Return after how many batches ranks that were asked to end have left."""
    told = [int(numbers[0]) for of_rank in records for _, what, numbers in of_rank.seen if what == "stopped"]
    return max(told, default=None)


def _run(
    job: list[Move], begin: int, folder: Path, records: Sequence[Records], saved: Saved | None
) -> BaseException | None:
    start = job[0]
    assert isinstance(start, Start)

    def of_rank() -> None:
        own = records[hocket.join().rank]
        script = Script(start, folder, own, saved)
        for number, move in enumerate(job[1:], begin + 1):
            script.perform(number, move)

    asked = any(isinstance(move, Signal) for move in job)
    try:
        with SIGNALS.listening() if asked else nullcontext():
            hocket.virtual(start.ranks).run(of_rank)
    except Exception as error:
        return error
    return None


def _compare(
    program: Program,
    records: Sequence[Records],
    expected: Sequence[Records],
    error: BaseException | None,
    tolerance: float,
) -> None:
    for rank, (ours, theirs) in enumerate(zip(records, expected, strict=True)):
        found = difference(ours, theirs, tolerance)
        if found is not None:
            raise WrongError(_told(program, found[0], f"rank {rank}: {found[1]}", error))
        if error is None and len(ours.seen) != len(theirs.seen):
            raise WrongError(_told(program, ours.move, f"rank {rank} has seen too little, or too much"))


def _judge(program: Program, records: Sequence[Records], error: BaseException) -> None:
    """Accept an error that names the move that was meant to be one."""
    at = max(of_rank.move for of_rank in records)
    move = program[at]
    expected: tuple[str, ...] = ()
    if isinstance(move, Refuse):
        expected = REFUSALS[move.what].says
    elif isinstance(move, Poison):
        expected = (f"rank {move.rank} ",)
    kind = NonFiniteError if isinstance(move, Poison) else HocketError
    # Only ranks that wait for one that has left are meant to end so.
    hangs = isinstance(error, DeadlockError) and not (isinstance(move, Refuse) and REFUSALS[move.what].others)
    is_meant = isinstance(error, kind) and not hangs
    if not is_meant or not any(re.search(word, str(error)) for word in expected):
        raise WrongError(_told(program, at, f"{type(error).__name__}: {error}", error)) from error


def _told(program: Program, at: int, what: str, error: BaseException | None = None) -> str:
    also = f"\n  and ended with {type(error).__name__}: {error}" if error is not None else ""
    return f"move {at}, {program[at]}:\n  {what}{also}\nAgain:\n{written(program)}"


def written(program: Program) -> str:
    """Return a program as a script."""
    moves = "".join(f"    {move!r},\n" for move in program)
    return f"check([\n{moves}])"
