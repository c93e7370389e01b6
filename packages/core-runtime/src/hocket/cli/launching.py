"""`hocket launch`: start a user's own script on ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hocket.cli.comparing import require_plotly, write_report
from hocket.cli.printing import say_results
from hocket.cli.wanted_ranks import WantedRanks, launch_here
from hocket.errors import UserError
from hocket.launch.joining import launched
from hocket.results import SUMMARY
from hocket.results.provenance import describe_start
from hocket.results.script import OUT, START, TRACE, check_folder

_AGAIN = (
    "run the same command again; a script continues from its last checkpoint if it loads one, with "
    "session.load(folder, missing='start'), Trainer's resume_from_checkpoint or Lightning's ckpt_path"
)


def launch_command(
    wanted: WantedRanks,
    script: str,
    arguments: Sequence[str],
    *,
    module: bool,
    out: Path | None = None,
    trace: bool = False,
    report: bool = False,
) -> int:
    """Carry out `hocket launch` and return the exit status.

    Args:
        wanted: the ranks.
        script: a Python file, a module, or any program.
        arguments: the script's arguments.
        module: whether `script` is a module.
        out: the folder for the results of the script's session; None for none.
        trace: write a trace there.
        report: write a page there.

    Raises:
        UserError: there is no such script, the number of ranks is missing, this process is a rank itself, or the folder
            cannot be used.
    """
    found = launched()
    if found is not None:
        raise UserError(
            f"{found.launcher} already started this process as one of {found.size} ranks: start {script} "
            "directly, without `hocket launch`"
        )
    if wanted.size is None:
        raise UserError("the number of ranks is missing: give -n 4, or --hosts a:4,b:4")
    command = [*_program(script, module), *arguments]
    if out is None and (trace or report):
        raise UserError("--trace and --report need a folder for the results: name one with --out")
    if report:
        require_plotly("--report")
    environment = {} if out is None else variables_of(out, trace=trace)
    status = launch_here(wanted.starter(command), wanted.size, command, lambda: _AGAIN, environment)
    if status == 0 and out is not None:
        _show_results(out, script, report)
    return status


def variables_of(out: Path, *, trace: bool) -> dict[str, str]:
    """Return the variables that have a script's session write into a folder.

    Raises:
        AttachError: the folder cannot be used; says why.
    """
    check_folder(out)
    found = {OUT: str(out.absolute()), START: json.dumps(describe_start())}
    return {**found, **({TRACE: "1"} if trace else {})}


def _show_results(out: Path, script: str, report: bool) -> None:
    if not (out / SUMMARY).exists():
        print(
            f"hocket: --out {out} has no results, because {script} closed no session of hocket.attach: train within "
            "`with session:`, or call session.close()",
            file=sys.stderr,
        )
        return
    if report:
        write_report(out, script)
    say_results(out)


def _program(script: str, module: bool) -> list[str]:
    if module:
        return [sys.executable, "-m", script]
    if script.endswith(".py"):
        if not os.path.isfile(script):
            raise UserError(f"there is no file {script}")
        return [sys.executable, script]
    if shutil.which(script) is None:
        raise UserError(
            f"there is no program {script}; give a script whose name ends in .py, or a module after -m"
        )
    return [script]
