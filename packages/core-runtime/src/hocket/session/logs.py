"""The logs of `session.open_log`, in a folder of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hocket.disk import naming
from hocket.loggers import Log, Logger
from hocket.own_files import claim
from hocket.plain import TreeView
from hocket.plugin import Kind, default_registry


def open_logs(folder: Path, loggers: Sequence[Logger | str], config: TreeView, step: int) -> list[Log]:
    """Open logs in a folder, which is made where it is missing.

    Args:
        folder: the folder.
        loggers: components or their names; `jsonl` where there is none.
        config: the run's configuration.
        step: the step after which a run goes on; 0 for one that begins.

    Raises:
        UserError: no such logger, a library that it needs is not installed, or another's file is in the way.
        WriteError: the folder cannot be written.
    """
    chosen = [
        default_registry().resolve(Kind.LOGGER, each)() if isinstance(each, str) else each
        for each in loggers or ("jsonl",)
    ]
    for logger in chosen:
        logger.check()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder, *(name for logger in chosen for name in logger.files))
    return [logger.open(folder, config, step or None) for logger in chosen]
