"""`hocket new plugin`: a package to start from, with components, recipes and their tests."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from hocket import __version__
from hocket.errors import UserError
from hocket.plugin import KNOWN_WORDS, default_registry

_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def new_plugin_command(word: str, into: Path) -> None:
    """Carry out `hocket new plugin WORD`."""
    folder = write_plugin(word, into)
    print(
        f"{folder} has a topology, a compressor, a collective, a recipe of each, and their tests. Next:\n"
        f"  cd {folder}\n"
        "  pip install -e '.[test]'\n"
        "  pytest\n"
        f"  hocket run {word} -n 4"
    )


def write_plugin(word: str, into: Path) -> Path:
    """Write a new plugin's package.

    Args:
        word: the plugin's name, which stands before the dot in configs.
        into: the folder in which `hocket-WORD` is made.

    Returns:
        The package's folder.

    Raises:
        UserError: the word is malformed or taken, or the folder exists or cannot be written.
    """
    if not _WORD.fullmatch(word):
        raise UserError(
            f"{word!r} cannot be a plugin's name; allowed: lower-case letters, digits and single underscores, with "
            "a letter first, such as my_gossip"
        )
    if word in KNOWN_WORDS or word in default_registry().installed():
        raise UserError(f"{word!r} is the name of a plugin (`hocket plugins`): choose another name")
    folder = into / f"hocket-{word.replace('_', '-')}"
    try:
        folder.mkdir(parents=True)
        _write(files("hocket.cli") / "template", folder, word)
    except FileExistsError as error:
        raise UserError(
            f"{folder} exists already: choose another name, or another folder with --into"
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    return folder


def _write(template: Traversable, folder: Path, word: str) -> None:
    for entry in template.iterdir():
        path = folder / entry.name.replace("WORD", word).removesuffix(".txt")
        if entry.is_dir():
            path.mkdir()
            _write(entry, path, word)
        elif entry.name.endswith(".txt"):
            text = entry.read_text(encoding="utf-8").replace(
                "hocket-WORD", f"hocket-{word.replace('_', '-')}"
            )
            path.write_text(text.replace("WORD", word).replace("CORE", __version__), encoding="utf-8")
