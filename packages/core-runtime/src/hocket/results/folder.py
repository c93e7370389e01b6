"""The folder of a run's results, from its first file on until the run has begun."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.disk import locked, write_text
from hocket.errors import UserError, reason
from hocket.own_files import claim, release, remember, remembered
from hocket.plain import TreeView
from hocket.results import CONFIG, NEXT_CONFIG, NEXT_START
from hocket.results.kept_config import text_of_config

#: The message about a folder into which another run writes.
_BUSY = (
    "another run is writing to this folder ({holder}): name another folder, or wait for that run, or end it"
)


@contextmanager
def prepared(
    folder: Path,
    label: str,
    names: Sequence[str],
    config: TreeView,
    start: TreeView,
    check: Callable[[], None],
) -> Iterator[None]:
    """Keep a folder for a run in a `with` statement.

    Until the run trains, its configuration and start stand beside an earlier run's.

    Args:
        folder: the folder; made where it is missing, and removed if nothing came of the run.
        label: the folder's name in messages.
        names: the names of the files and folders that the run writes.
        config: its complete configuration.
        start: the mapping of `describe_start`.
        check: refuses the folder, once no other run can write into it, by a UserError.

    Raises:
        UserError: the folder cannot be written, another run is at work there, or `check` refuses it.
    """
    next_config, next_start = folder / NEXT_CONFIG, folder / NEXT_START
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(remove_empty, folder)  # if nothing came of the run
            stack.enter_context(locked(folder, secrets.token_hex(4), f"{label}: {_BUSY}"))
            check()
            stack.callback(release, folder)
            claim(folder, *names)
            text = text_of_config(config)
            before = remembered(folder, CONFIG)
            remember(folder, CONFIG, [*before, text])
            for path, content in ((next_config, text), (next_start, json.dumps(start))):
                write_text(path, content, sync=path is next_config)  # which becomes the run's
                stack.callback(path.unlink, missing_ok=True)
            stack.callback(_forget_unbegun, folder, before)
        except OSError as error:
            raise UserError(f"{label} cannot be written: {reason(error)}") from error
        yield


def _forget_unbegun(folder: Path, before: Sequence[str]) -> None:
    """Note the earlier contents of the configuration again, if the new run has not replaced it."""
    if (folder / NEXT_CONFIG).exists():
        remember(folder, CONFIG, before)


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def refuse_unwritable(folder: Path, label: str) -> None:
    """Refuse a folder that cannot be made or written.

    Args:
        folder: the folder for results.
        label: the folder's name in the message.

    Raises:
        UserError: gives the reason.
    """
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        lost = there.is_symlink() and not there.exists()
        what = f"a link to {os.readlink(there)}, which is not there" if lost else "no folder"
        raise UserError(f"{label} cannot be written, because {there} is {what}: name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{label} cannot be written, because {there} belongs to another user: name another folder"
        )
