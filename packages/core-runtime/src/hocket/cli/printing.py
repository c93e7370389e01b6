"""Output on terminals and into files that take less than Unicode, as with LANG=C: every character has a stand-in."""

from __future__ import annotations

import codecs
import io
import sys

__all__ = ["print_anything"]

#: What stands for the characters that Hocket prints itself; others stand as Python writes them, such as `\u03c6`.
_IN_ASCII = {"±": "+-", "µ": "u", "…": "..."}

_NAME = "hocket"


def print_anything() -> None:
    """Have standard output and standard error take all characters."""
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
