"""Output on terminals and into files without Unicode, as with LANG=C: every character has a stand-in."""

from __future__ import annotations

import codecs
import io
import sys

__all__ = ["TEXT_WIDTH", "print_anything"]

#: Columns of text where the output is no terminal.
TEXT_WIDTH = 110

#: Stand-ins for the characters that Hocket itself prints; others are written as in Python, such as `\u03c6`.
_IN_ASCII = {"±": "+-", "µ": "u", "…": "..."}

_NAME = "hocket"


def print_anything() -> None:
    """Make standard output and standard error accept all characters."""
    codecs.register_error(_NAME, _stand_in)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_NAME)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    written = [
        _IN_ASCII.get(each) or each.encode("ascii", "backslashreplace").decode() for each in characters
    ]
    return "".join(written), error.end
