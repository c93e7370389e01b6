"""Text of commands, in lines as wide as the terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from hocket.results import NEXT_CONFIG, TRACE_FILE

#: Columns of text where the output is no terminal.
_TEXT_WIDTH = 110


def say(lines: Iterable[str], bullet: str = "- ") -> None:
    """Print paragraphs, each behind a bullet and as far indented as it is long."""
    width = shutil.get_terminal_size((_TEXT_WIDTH, 0)).columns
    for line in lines:
        print(textwrap.fill(line, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)))


def say_command(before: str, words: str, last: str) -> None:
    """Print a command behind a text, its last word quoted, in lines that a shell reads as one."""
    width = shutil.get_terminal_size((_TEXT_WIDTH, 0)).columns
    quoted = shlex.quote(last).replace(" ", "\0")  # no line ends within quotes
    wrapped = textwrap.fill(
        f"{before}{words} {quoted}",
        width - 2,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(wrapped.replace("\n", " \\\n").replace("\0", " "))


def say_results(folder: Path) -> None:
    """Print the folder of a run's results, and the names of what is in it."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    print(f"results in {os.path.relpath(folder)}: {', '.join(names)}")


def say_left_trace(folder: Path) -> None:
    """Write a trace from the recordings that the ranks of a failed run have left, and print its path."""
    from hocket.trace import merge_left

    path = folder / TRACE_FILE
    if path.exists() and (folder / NEXT_CONFIG).exists():
        return  # an earlier run's trace, which this run has not replaced
    if merge_left(path):
        print(f"hocket: trace of the ranks until the failure: {os.path.relpath(path)}", file=sys.stderr)
