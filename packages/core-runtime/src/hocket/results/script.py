"""The agreement between commands and the sessions of scripts that they start: variables, and files in the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hocket.errors import AttachError, UserError, reason
from hocket.own_files import claim, refuse_foreign
from hocket.plain import TreeView
from hocket.results import (
    CONFIG,
    NEXT_CONFIG,
    NEXT_START,
    RECORDINGS,
    REPORT,
    STARTS,
    SUMMARY,
    TRACE_FILE,
)
from hocket.results.folder import refuse_unwritable

#: Variables of a script's ranks, from `hocket launch` and `hocket sweep`: the folder of its results, its start as
#: JSON, whether to trace it, and the strategy in place of the script's own, as JSON [recipe or null, *overrides].
OUT, START, TRACE, STRATEGY = "HOCKET_OUT", "HOCKET_START", "HOCKET_TRACE", "HOCKET_STRATEGY"

#: The name of a script's task in its configuration.
SCRIPT = "script"

#: The parts of a row of metrics that are not the script's own.
OWN_KEYS = ("step", "seconds", "bytes_sent", "exposed_wait_s", "wait_share")

#: The files that a script's run writes besides its rows of metrics.
FILES = (CONFIG, NEXT_CONFIG, STARTS, NEXT_START, SUMMARY, REPORT, TRACE_FILE, RECORDINGS)


def is_of_script(config: TreeView) -> bool:
    """Return whether the configuration in a run's folder is that of a script, not of a task."""
    task = config.get("task")
    return isinstance(task, Mapping) and task.get("name") == SCRIPT


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, or holds other files or a run that has ended.

    Raises:
        AttachError: says which it is, and what to do.
    """
    try:
        refuse_unwritable(folder, f"out {folder}")
        refuse_foreign(folder, FILES, "out")
    except UserError as error:
        raise AttachError(str(error)) from error
    if (folder / SUMMARY).exists():
        raise AttachError(
            f"out {folder} holds the results of a run that has ended: name another folder, or delete this one"
        )


def take_folder(folder: Path) -> None:
    """Make the folder for a script's results, and note the names of its files as Hocket's.

    Raises:
        AttachError: the folder cannot be used; says why.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder, *FILES)
    except OSError as error:
        raise AttachError(f"out {folder} cannot be written: {reason(error)}") from error
