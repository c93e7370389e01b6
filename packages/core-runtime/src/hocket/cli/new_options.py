"""`hocket new`, as the command line has it."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.click_parts import Folder


@click.group()
def new() -> None:
    """Create the files of a new plugin."""


@new.command("plugin")
@click.argument("name")
@click.option(
    "--into",
    type=Folder(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder in which to create hocket-NAME; default: this one.",
)
def new_plugin(name: str, into: Path) -> None:
    """Create a plugin's package, with tests that pass.

    It has a topology, a compressor, a collective, and a recipe for each.

    \b
    hocket new plugin mine
    """
    from hocket.cli.new import new_plugin_command

    new_plugin_command(name, into)
