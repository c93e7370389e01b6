"""Text of commands, in lines as wide as the terminal."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path

__all__ = ["say", "say_results"]

#: Columns of text where the output is no terminal.
_TEXT_WIDTH = 110


def say(lines: Iterable[str], bullet: str = "- ") -> None:
    """Print paragraphs, each behind a bullet and as far indented as it is long."""
    width = shutil.get_terminal_size((_TEXT_WIDTH, 0)).columns
    for line in lines:
        print(textwrap.fill(line, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)))


def say_results(folder: Path) -> None:
    """Print the folder of a run's results, and the names of what is in it."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    print(f"results in {os.path.relpath(folder)}: {', '.join(names)}")
