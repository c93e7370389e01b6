"""`hocket sweep`: a run for each combination of values that has not ended, and a comparison of all."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import yaml

from hocket.checkpoint.folder import complete
from hocket.cli.combinations import Combination, combinations
from hocket.cli.comparing import PAGE, compare_command
from hocket.cli.folders import files_of_run
from hocket.cli.sweep_run import OUTPUT, SweepRun
from hocket.cli.wanted_ranks import WantedRanks
from hocket.comparison.group import differing_settings
from hocket.config.settings import REPORTING
from hocket.disk import write_text
from hocket.errors import UserError, reason, some
from hocket.launch.joining import launched
from hocket.own_files import claim, refuse_foreign
from hocket.pictures import NO_PICTURE
from hocket.results import CHECKPOINTS, CONFIG, SOURCE, STARTS, SWEPT_CONFIG
from hocket.results.kept_config import differing_keys
from hocket.results.provenance import (
    add_start,
    changed_modules,
    changed_since,
    describe_start,
    module_contents,
)
from hocket.training.run import RunConfig, load_run, resolved

_LOCK = ".sweep.lock"


def sweep_command(
    target: str,
    arguments: Sequence[str],
    wanted: WantedRanks,
    out: Path | None,
    jobs: int,
    dry_run: bool = False,
) -> int:
    """Carry out `hocket sweep` and return the exit status.

    Args:
        target: a recipe's name or a file.
        arguments: keys and their values.
        wanted: the ranks of each run.
        out: the folder for results, if one is named.
        jobs: the number of runs at a time.
        dry_run: list the runs, and start none.

    Raises:
        UserError: a wrong argument, option or setting; nothing has been started then.
    """
    chosen = combinations(target, arguments, wanted.size, wanted.transport)
    _check(chosen)
    configs = [resolved(each.run) for each in chosen]
    code = {file: held for config in configs for file, held in module_contents(config).items()}
    folder = out or Path("sweeps") / Path(target).name.removesuffix(".yaml").removesuffix(".yml")
    runs = [_RunOfFile(folder / each.name, each, wanted.words) for each in chosen]
    swept = [argument.partition("=")[0].strip() for argument in arguments]
    labels = [each.run.strategy.name or each.name for each in chosen]
    differing = differing_settings(list(zip(labels, configs, strict=True)), swept)
    return carry_out_in(folder, runs, jobs, code, differing, dry_run=dry_run)


def carry_out_in(
    folder: Path,
    runs: Sequence[SweepRun],
    jobs: int,
    code: Mapping[Path, bytes],
    notes: Sequence[str] = (),
    *,
    dry_run: bool,
) -> int:
    """Carry out the runs of a sweep that have not ended, compare all, and return the exit status.

    Args:
        folder: the folder of the sweep's results, with those of the runs in it.
        runs: all runs of the sweep.
        jobs: the number of runs at a time.
        code: the user's own files, as of `module_contents`.
        notes: lines to print before the first run.
        dry_run: list the runs, and start none.

    Raises:
        UserError: the folder cannot be used; nothing has been started then.
    """
    found = launched()
    if found is not None:
        raise UserError(f"hocket sweep starts the ranks itself: call it without {found.launcher}")
    if (folder / CONFIG).exists():
        raise UserError(
            f"--out {folder} is the folder of a run, where `hocket compare {folder}` would not find a sweep: name "
            "another folder"
        )
    names = [run.folder.name for run in runs if run.folder.is_file()]
    refuse_foreign(folder, (STARTS, PAGE, *names), "--out")
    if dry_run:
        _list(folder, runs, jobs, notes)
        return 0
    with _held(folder) as lock:
        for run in runs:
            run.check_folder()
        claim(folder, STARTS)
        add_start(folder, describe_start())
        print(
            f"{len(runs)} run{'s' * (len(runs) != 1)}, {jobs} at a time, results in {os.path.relpath(folder)}",
            flush=True,
        )
        for line in notes:
            print(line, flush=True)
        failed = _carry_out(runs, jobs, lock, code)
        _compare([run.folder for run in runs if run not in failed], folder)
    _say_what_is_left(runs, failed)
    return 1 if failed else 0


def _compare(ended: Sequence[Path], folder: Path) -> None:
    """Print a table of the runs that have ended, and draw the page where Plotly is."""
    others = sorted({path.parent for path in folder.glob(f"*/{CONFIG}")} - {*ended})
    if others:
        print(
            f"earlier runs in {os.path.relpath(folder)} are left out of the table and the page: "
            f"{some([run.name for run in others])}; `hocket compare {os.path.relpath(folder)} --out "
            f"{os.path.relpath(folder)}` compares all",
        )
    if ended:
        drawn = find_spec("plotly") is not None
        compare_command(ended, (), (), folder if drawn else None)
        if not drawn:
            print(NO_PICTURE)


def _list(folder: Path, runs: Sequence[SweepRun], jobs: int, notes: Sequence[str]) -> None:
    """Print what a sweep would do."""
    print(
        f"would start {len(runs)} run{'s' * (len(runs) != 1)}, {jobs} at a time, results in {os.path.relpath(folder)}"
    )
    print("\n".join(notes), end="\n" * bool(notes))
    for run in runs:
        run.check_folder()
        begins = "has ended before" if run.has_ended else "would go on" if run.goes_on else "would begin"
        print(f"{run.folder.name}: {run.ranks} rank{'s' * (run.ranks > 1)}, {begins}")
    print("everything was checked, and nothing was started")


def _say_what_is_left(runs: Sequence[SweepRun], failed: Sequence[SweepRun]) -> None:
    not_started = [run.folder.name for run in failed if run.is_ended]
    tried = [run.folder.name for run in failed if not run.is_ended]
    if tried:
        print(
            f"hocket: {len(tried)} of {len(runs)} runs have failed: {some(tried)}; the same command tries them again",
            file=sys.stderr,
        )
    if not_started:
        print(
            f"hocket: {len(not_started)} of {len(runs)} runs were not started: {some(not_started)}; restore the "
            f"module (earlier runs have a copy in `{SOURCE}`) and repeat the command, or sweep the new code into "
            "another folder with --out",
            file=sys.stderr,
        )


@dataclass(eq=False)
class _RunOfFile(SweepRun):
    """A run of a task, and the options that its ranks are started with."""

    combination: Combination
    options: Sequence[str]
    interrupted: ClassVar[str] = "the runs save themselves and end; the same command continues them"

    @property
    def goes_on(self) -> bool:
        return (self.folder / CONFIG).exists() and bool(complete(self.folder / CHECKPOINTS))

    @property
    def ranks(self) -> int:
        return self.combination.run.ranks or 1

    def check_folder(self) -> None:
        path = self.folder / CONFIG
        if not (self.has_ended or self.goes_on):
            refuse_foreign(self.folder, (SWEPT_CONFIG, OUTPUT, *files_of_run(self.combination.run)), "--out")
        if not path.exists():
            return
        asked = resolved(self.combination.run)
        keys = [key for key in asked if key not in REPORTING]
        differing = differing_keys(resolved(load_run(str(path))), asked, keys)
        if differing:
            differences = some([f"{key} is {was}, but you asked for {new}" for key, was, new in differing])
            raise UserError(f"{self.folder} holds another run: {differences}. Name another folder with --out")
        if not (self.has_ended or self.goes_on):
            return
        changed = changed_modules(asked, self.folder)
        if changed:
            raise UserError(
                f"{self.folder} holds a run with other code: {some(changed)} changed since then. Name another folder "
                f"with --out, restore the earlier code (a copy is in {self.folder}), or remove that folder"
            )

    def prepare(self) -> tuple[list[str], dict[str, str]]:
        if self.goes_on:
            return ["resume", str(self.folder), *self.options], {}
        file = self.folder / SWEPT_CONFIG
        write_text(file, yaml.safe_dump(resolved(self.combination.run), sort_keys=False), sync=False)
        return ["run", str(file), "--out", str(self.folder), *self.options], {}


def _carry_out(runs: Sequence[SweepRun], jobs: int, lock: int, code: Mapping[Path, bytes]) -> list[SweepRun]:
    """Carry out the runs that have not ended, and return those that failed or were not started.

    Args:
        runs: all runs of the sweep.
        jobs: the number of runs at a time.
        lock: a descriptor that runs keep open.
        code: the user's own modules, as of `module_contents`; once one has changed, no further run is started.
    """
    left = [run for run in runs if not run.has_ended]
    for run in runs:
        if run not in left:
            print(f"{run.folder.name}: has ended before", flush=True)
    places = itertools.count(len(runs) - len(left) + 1)
    telling = threading.Lock()
    changed: list[str] = []

    def carry_out(run: SweepRun) -> bool:
        with telling:
            if not changed:
                changed.extend(changed_since(code))
                if changed:
                    text = f"{some(changed)} changed since the sweep began: no further run is started"
                    print(f"hocket: {text}", file=sys.stderr, flush=True)
        if changed:
            run.end()
        status = run.carry_out(lock, jobs)
        if run.is_ended:
            return False
        with telling:  # here, so that a run's result is printed before the next run begins
            print(f"[{next(places)}/{len(runs)}] {run.folder.name}: {run.outcome(status)}", flush=True)
        return status == 0 and run.has_ended

    with _terminated_as_interrupted(), ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(carry_out, run) for run in left]
        try:
            wait(futures)
        except BaseException:
            print(runs[0].interrupted, file=sys.stderr, flush=True)
            for run in left:
                run.end()
            raise
    return [run for run, future in zip(left, futures, strict=True) if not future.result()]


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the runs end, too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Keep a folder for this sweep; yield the descriptor that locks it.

    Raises:
        UserError: it cannot be written, or another sweep is at work there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {reason(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another sweep, or one of its runs, is still writing to {folder}: wait for it, or end it"
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check(chosen: Sequence[Combination]) -> None:
    """Check all runs before the first starts; equal tasks are checked once."""
    from hocket.cli.checking import check_run, check_tensor_plan

    seen = set()
    for run in (each.run for each in chosen):
        task = check_run(run)
        check_tensor_plan(run, task)
        if (key := _task_key(run)) not in seen:
            task.data(run.seed)
            seen.add(key)


def _task_key(run: RunConfig) -> str:
    return json.dumps(run.task.plain(), sort_keys=True, default=str)
