"""The folder of a run's results: made, taken over or continued."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from hocket.checkpoint.folder import complete, foreign, newest_first
from hocket.checkpoint.manifest import Manifest, rank_file
from hocket.comparison.record import runs_within
from hocket.config.source import SLOTS, parse_override
from hocket.errors import UserError, reason, some
from hocket.own_files import (
    NOTE,
    adopt,
    is_marked,
    refuse_foreign,
    remember,
    remembered,
)
from hocket.plain import TreeView
from hocket.results import CHECKPOINTS, CONFIG, SUMMARY
from hocket.results.files import files_of
from hocket.results.folder import prepared as kept_for_run
from hocket.results.folder import refuse_unwritable, remove_empty
from hocket.results.kept_config import changed_keys, differing_keys, read_config, text_of_config
from hocket.results.script import is_of_script
from hocket.training.run import RunConfig, load_run, resolved

_log = logging.getLogger("hocket")

#: The settings that a resumed run shares with the interrupted one; the checkpoint knows the strategy.
_FIXED = (
    "task",
    "start_from",
    "optimizer",
    "schedulers",
    "accumulate",
    "clip_grad_norm",
    "engine",
    "island",
    "batch_size",
    "seed",
    "on_nonfinite",
)


#: The most characters of a run's name in its folder's name: each has up to 4 bytes, and file systems take 255.
_LONGEST_NAME = 50


@contextmanager
def named_folder(out: Path | None, run: RunConfig, *, make: bool) -> Iterator[Path]:
    """Give the folder for a run's results: the user's, or a new one named by recipe and time.

    Args:
        out: the user's folder, or None.
        run: the run, whose name a new folder gets.
        make: make a new folder, so that it stays this run's; it is removed if it stays empty.
    """
    if out is not None:
        yield out
        return
    if not make:
        refuse_unwritable(Path("runs"), "runs")
    of_run = (run.strategy.name or "run").replace("/", "-")[:_LONGEST_NAME]
    name = f"{of_run}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    folder = next(path for each in names if _is_new(path := Path("runs") / each, make))
    try:
        yield folder
    finally:
        if make:
            remove_empty(folder)
            remove_empty(folder.parent)


def _is_new(folder: Path, make: bool) -> bool:
    """Return whether no other run has the folder; makes it, with `make`."""
    if not make:
        return not folder.exists()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(folder):
            return False
        raise UserError(
            f"{folder} cannot be made ({reason(error)}): name another folder with --out"
        ) from error
    return True


def load_resumed(folder: Path, overrides: Sequence[str], *, elsewhere: bool = False) -> RunConfig:
    """Return the run that continues the one in a folder: its own configuration, and the overrides on top.

    `ranks` is None if neither the folder nor an override gives it.

    Args:
        folder: the folder of the run's results.
        overrides: the settings that change.
        elsewhere: whether a host has checkpoints of the run, so that this one need not.

    Raises:
        UserError: there is nothing to continue, or an override would make it another run; names the keys.
    """
    path = folder / CONFIG
    if not path.exists():
        is_there = f"it has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} holds no run to resume: {is_there}{_host_of_rank_0(folder)}")
    if is_of_script(read_config(path)):
        raise UserError(
            f"{folder} is the run of a script: repeat the command that started it. The script continues "
            "from its own checkpoint if it calls session.load(folder, missing='start')"
        )
    again = f"hocket run {path} --out {folder}{' --overwrite' * (folder / SUMMARY).exists()}"
    if not elsewhere:
        newest_first(folder / CHECKPOINTS, f"`{again}` begins the run anew")
    if any(parse_override(text).keys == ("recipe",) for text in overrides):
        raise UserError(f"{path} is complete and does not need a recipe: leave out recipe=")
    _refuse_changed(path)
    earlier, run = load_run(str(path)), load_run(str(path), overrides)
    differing = differing_keys(resolved(earlier), resolved(run), _FIXED)
    if differing:
        keys = some([f"{key} is {was}, but you asked for {asked}" for key, was, asked in differing])
        raise UserError(
            f"{path}: {keys}. A resumed run keeps its settings: only its length, ranks and reports may change"
        )
    return run


def _host_of_rank_0(folder: Path) -> str:
    """Return words on the host that should have a run's configuration, where this one has its checkpoints alone."""
    saved = complete(folder / CHECKPOINTS)
    host = Manifest.read(saved[-1], ()).hosts.get(rank_file(0)) if saved else None
    elsewhere = host is not None and host != socket.gethostname()
    return f". Rank 0 of the run was on {host}: resume it there" if elsewhere else ""


def _refuse_changed(path: Path) -> None:
    """Refuse a run's configuration that somebody, or a disk, has changed since the run wrote it."""
    changed = changed_keys(path, read_config(path))
    if changed:
        keys = some([f"{key} was {was}, and is now {now}" for key, was, now in changed])
        raise UserError(
            f"{path} was changed since the run wrote it: {keys}. Restore the file, and pass changes as "
            f"KEY=VALUE to `hocket resume {path.parent}`; or start a new run with it: `hocket run {path} "
            "--out OTHER`"
        )


def check_asked(target: str, folder: Path) -> None:
    """Compare TARGET of `hocket run TARGET --resume` with the run in the folder, whose settings are used.

    Raises:
        UserError: TARGET is another recipe.
    """
    path = folder / CONFIG
    asked, run = load_run(target), load_run(str(path))
    if asked.strategy.name != run.strategy.name:
        names = [
            repr(name) if name else "a strategy of its own"
            for name in (run.strategy.name, asked.strategy.name)
        ]
        raise UserError(
            f"{path} is a run of {names[0]}, not of {names[1]}: continue it with `hocket resume {folder}`, or name "
            "another folder"
        )
    keys = _keys_of_file(target)
    differing = [key for key, _, _ in differing_keys(resolved(run), resolved(asked), keys)]
    if differing:
        print(
            f"hocket: {target} differs from {path} in {some(differing)}: the folder's settings are used; to "
            "change a setting, write KEY=VALUE",
            file=sys.stderr,
        )


def files_of_run(run: RunConfig) -> list[str]:
    """Return the names of the files and folders that a run writes into the folder of its results."""
    return files_of(run.loggers, trace=run.trace, report=run.report)


def check_free(folder: Path, run: RunConfig, overwrite: bool) -> None:
    """Refuse a folder with runs in it, with an earlier run's results or checkpoints, or with others' files.

    Args:
        folder: the folder for a run's results.
        run: the run that is to write there.
        overwrite: whether an earlier run's results may be replaced; runs within the folder are refused nevertheless.

    Raises:
        UserError: says which it is, and what to do.
    """
    refuse_unwritable(folder, f"--out {folder}")
    runs = [each.name for each in runs_within(folder)]
    if runs:
        raise UserError(
            f"--out {folder} holds runs ({some(runs)}). A run in the same folder would hide them from "
            f"`hocket compare {folder}`: name a folder inside it, such as {folder / 'NAME'}, or another "
            "folder"
        )
    refuse_foreign(folder, files_of_run(run), "--out")
    if overwrite:
        kept = foreign(folder / CHECKPOINTS)
        if kept:
            raise UserError(
                f"--out {folder / CHECKPOINTS}: {some(kept)} holds files that Hocket did not write, or a damaged "
                "manifest, so it is not replaced: name another folder, or move it away"
            )
        return
    others = "name another folder, or replace it with --overwrite"
    if complete(folder / CHECKPOINTS):
        raise UserError(
            f"--out {folder} holds the checkpoints of an earlier run: continue it with `hocket resume {folder}`, "
            f"{others}"
        )
    if (folder / SUMMARY).exists():
        raise UserError(f"--out {folder} holds the results of an earlier run: {others}")


def prepared(
    folder: Path, run: RunConfig, start: TreeView, resume: bool, overwrite: bool
) -> AbstractContextManager[None]:
    """Keep a folder for a run in a `with` statement, as `hocket.results.folder.prepared` does.

    Raises:
        UserError: the folder cannot be written, another run is at work there, or `check_free` refuses it.
    """
    check = partial(_take_over, folder, run) if resume else partial(check_free, folder, run, overwrite)
    return kept_for_run(folder, f"--out {folder}", files_of_run(run), resolved(run), start, check)


def _take_over(folder: Path, run: RunConfig) -> None:
    """Note the files of a run that goes on, if there is no note."""
    if not is_marked(folder):
        adopt(folder, [name for name in files_of_run(run) if os.path.lexists(folder / name)])
    if not remembered(folder, CONFIG):
        _log.warning(
            "%s may have been changed by hand, because %s has no record of its content. The run continues with it",
            folder / CONFIG,
            NOTE,
        )
        remember(folder, CONFIG, [text_of_config(read_config(folder / CONFIG))])


def with_ranks(run: RunConfig, ranks: int | None, overrides: Sequence[str]) -> RunConfig:
    """Return a resumed run with the number of ranks of `-n` or an override; None if there is neither."""
    named = any(parse_override(text).keys == ("ranks",) for text in overrides)
    return replace(run, ranks=ranks or (run.ranks if named else None))


def _keys_of_file(target: str) -> list[str]:
    """Return the settings that a file itself gives; none if the target is a recipe's name."""
    path = Path(target)
    if not path.is_file():
        return []
    keys = dict.fromkeys(key.partition(".")[0] for key in yaml.safe_load(path.read_bytes()))
    settings = [key for key in keys if key not in (*SLOTS, "strategy", "recipe", "phases", "ranks", "name")]
    return [*settings, "strategy"] if {*SLOTS, "strategy"} & keys.keys() else settings
