"""Where a run comes from: what started it and on which hosts, as `run.json`, and the user's own modules beside it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from hocket.plugin.discovery import CORE, installed
from hocket.training import SOURCE, STARTS

__all__ = ["add_start", "describe_start", "keep_user_modules", "ranks_by_host"]

_PACKAGES = (CORE.package, "torch", "numpy", "numba", "mpi4py")
#: Of a run's configuration, where `module:attribute` may stand.
_NAMING = ("task", "optimizer", "schedulers")
_GIT_TIMEOUT_S = 10.0


def describe_start() -> dict[str, Any]:
    """Return what is started here and with what: command, time, working directory, its git commit, versions.

    `git` is None outside of a repository; its `dirty` says whether tracked files differ from the commit.
    """
    return {
        "command": shlex.join(["hocket", *sys.argv[1:]]),
        "directory": os.getcwd(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
    }


def add_start(folder: Path, start: Mapping[str, Any], *, anew: bool = False) -> None:
    """Write a start to a folder's `run.json`, a list of all of them.

    Args:
        folder: of a run or of a sweep.
        start: as of `describe_start`, and what else is known.
        anew: leave out earlier ones, which were another run's.
    """
    path = folder / STARTS
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not anew else []
    path.write_text(json.dumps([*earlier, start], indent=2) + "\n", encoding="utf-8")


def ranks_by_host(host_names: Sequence[str]) -> dict[str, str]:
    """Return which ranks each host has, such as `0-3, 8`; host names by rank."""
    return {
        host: _ranges(rank for rank, name in enumerate(host_names) if name == host)
        for host in dict.fromkeys(host_names)
    }


def keep_user_modules(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Copy the user's own modules that a configuration names to a folder's `source`, and return where they lie in that.

    They are found from there: `cd FOLDER/source; hocket run ../config.yaml`. Those of installed packages are left out.

    Args:
        config: a run's, complete; what it names has been imported.
        folder: of the run's results.
    """
    from hocket.session.ranks import flattened
    from hocket.task.user import user_file

    kept = []
    for named in flattened({key: config.get(key) for key in _NAMING}).values():
        module, separator, _ = str(named).partition(":")
        found = user_file(module) if separator else None
        if found is None:
            continue
        path = Path(*module.split("."))
        path = path / found.name if found.stem == "__init__" else path.with_suffix(found.suffix)
        target = folder / SOURCE / path
        if not (target.exists() and target.samefile(found)):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target)
        kept.append(str(path))
    return sorted(set(kept))


def _git() -> dict[str, Any] | None:
    commit = _git_says("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git_says("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git_says(*command: str) -> str | None:
    """Return what git answers; None without git, outside of a repository, or where it takes too long."""
    try:
        done = subprocess.run(
            ["git", *command], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    plugins = (entry.dist.name for entry in installed() if entry.dist is not None)
    found = {name: _version(name) for name in (*_PACKAGES, *sorted(plugins))}
    return {name: told for name, told in found.items() if told is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ranges(ranks: Iterable[int]) -> str:
    """Write ascending numbers, those that follow each other as `first-last`."""
    groups = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = ([rank for _, rank in group] for _, group in groups)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
