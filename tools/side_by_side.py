"""The lines of `tools/test`, so many at a time: tests in forks of this process, which has imported torch, and commands.

    side_by_side.py NUMBER FAILED

Standard input has lines `run MARKERS ARGUMENT...`, for pytest, and others, for bash. When one ends, its output and
times are printed. The file FAILED gets the first argument of each `run` that fails.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

#: What most tests import, but for what they are about and pytest's plugins, whose assertions pytest rewrites.
_PRELOADED = ("matplotlib.figure", "numba", "omegaconf", "pytest", "rich.console", "torch.utils.data")
#: pytest's status where a folder has no test with these markers.
_NONE_FOUND = 5
_BEGUN_S = time.monotonic()


def begin(words: list[str], output: int) -> int:
    """Start a line's process, and return its number."""
    if words[0] != "run":
        to_output = [(os.POSIX_SPAWN_DUP2, output, number) for number in (1, 2)]
        command = ["bash", "-c", '"$@"', "bash", *words]
        return os.posix_spawnp("bash", command, os.environ, file_actions=to_output)
    pid = os.fork()
    if not pid:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["pytest", "-m", *words[1:]]
        sys.orig_argv = [sys.executable, "-m", *sys.argv]
        sys.path[0] = os.getcwd()
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    return pid


def carry_out(lines: list[list[str]], most: int, failed: Path) -> None:
    """Carry lines out, at most so many at a time; print what each has printed, and note what has failed."""
    running: dict[int, tuple[list[str], IO[bytes], float]] = {}
    while lines or running:
        while lines and len(running) < most:
            words, output = lines.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 (it is open as long as the process)
            running[begin(words, output.fileno())] = words, output, time.monotonic()
        pid, status, used = os.wait3(0)
        words, printed, begun_s = running.pop(pid)
        printed.seek(0)
        sys.stdout.buffer.write(printed.read())
        spans = f"from {begun_s - _BEGUN_S:.0f} s to {time.monotonic() - _BEGUN_S:.0f} s"
        print(f"{words[2]}: {used.ru_utime + used.ru_stime:.0f} s of processors, {spans}", flush=True)
        if words[0] == "run" and os.waitstatus_to_exitcode(status) not in (0, _NONE_FOUND):
            with failed.open("a") as file:
                print(words[2], file=file)


if __name__ == "__main__":
    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()
    _lines = [shlex.split(line) for line in sys.stdin]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    carry_out(_lines, int(sys.argv[1]), Path(sys.argv[2]))
