"""Parts of commands: options that several share, and the type of those that name a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Command = Callable[..., object]
Option = Callable[[Command], Command]


class Folder(click.Path):
    """The path of a folder; refuses an empty text, which a shell gives for an unset variable."""

    def __init__(self, **given: Any) -> None:
        super().__init__(readable=False, **given)  # the command that reads it says so in one line

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value is not None and not str(value).strip():
            self.fail("it is empty: name a folder ('.' for this one)", param, ctx)
        if value is not None:
            try:
                os.lstat(value)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                pass  # the command that uses the folder reports it
            except (OSError, ValueError) as error:  # no possible name, such as one that is too long
                self.fail(f"{getattr(error, 'strerror', None) or error}: name another folder", param, ctx)
        return super().convert(value, param, ctx)


def out_option(words: str, *, required: bool = False) -> Option:
    """Return the option for the folder of a command's results."""
    return click.option("--out", type=Folder(path_type=Path, file_okay=False), required=required, help=words)


def add_options(command: Command, options: Sequence[Option]) -> Command:
    """Add options to a command, which lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command
