"""`hocket launch`: start a user's own script on ranks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from hocket.cli.wanted_ranks import WantedRanks, launch_here
from hocket.errors import UserError
from hocket.transport.joining import launched

__all__ = ["launch_command"]

_AGAIN = (
    "run the same command again; a script goes on from its last checkpoint with "
    "session.load(folder, missing='start')"
)


def launch_command(wanted: WantedRanks, script: str, arguments: Sequence[str], *, module: bool) -> int:
    """Carry out `hocket launch` and return the exit status.

    Args:
        wanted: the ranks.
        script: a Python file, a module, or any program.
        arguments: the script's arguments.
        module: whether `script` is a module.

    Raises:
        UserError: there is no such script, the number of ranks is missing, or this process is a rank itself.
    """
    found = launched()
    if found is not None:
        raise UserError(
            f"{found.launcher} has started this process as one of {found.size} ranks: have it start {script} itself, "
            "without `hocket launch`"
        )
    if wanted.size is None:
        raise UserError("the number of ranks is missing: give -n 4, or --hosts a:4,b:4")
    command = [*_program(script, module), *arguments]
    return launch_here(wanted.starter(command), wanted.size, command, lambda: _AGAIN)


def _program(script: str, module: bool) -> list[str]:
    if module:
        return [sys.executable, "-m", script]
    if script.endswith(".py"):
        if not os.path.isfile(script):
            raise UserError(f"there is no file {script}")
        return [sys.executable, script]
    if shutil.which(script) is None:
        raise UserError(
            f"there is no program {script}; a Python script's name ends in .py, and a module follows -m"
        )
    return [script]
