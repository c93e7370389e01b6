"""Standard output and error that outlive their readers and full disks, and accept every character.

Without Unicode, as with LANG=C, every character has a stand-in.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = {1: "standard output", 2: "standard error"}

#: Stand-ins for the characters that Hocket itself prints; others are written as in Python, such as `\u03c6`.
_IN_ASCII = {"±": "+-", "µ": "u", "…": "..."}

#: The name of the codec error handler that writes stand-ins.
_STAND_INS = "hocket"


def keep_streams() -> None:
    """Drop output that can no longer be written, and write stand-ins for characters that a stream cannot.

    For the rest of the process; called as it begins.

    If the reader is gone, as `head` goes, nothing is said; any other reason is printed once, on standard error.
    Descriptors 0 to 2 that are closed are opened on an empty file: else the next file opened would get their number.
    """
    for number in (0, *_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = _kept(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _kept(sys.stderr, sys.__stderr__, 2)
    codecs.register_error(_STAND_INS, _stand_in)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_STAND_INS)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    written = [
        _IN_ASCII.get(each) or each.encode("ascii", "backslashreplace").decode() for each in characters
    ]
    return "".join(written), error.end


def _kept(stream: TextIO | None, first: TextIO | None, number: int) -> TextIO:
    """Return a stream like this one that outlives its reader; another object in its place is kept."""
    if stream is None:
        return io.TextIOWrapper(
            io.BufferedWriter(_GuardedDescriptor(number)), encoding="utf-8", errors="replace"
        )
    if stream is not first or not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream
    stream.flush()
    raw = _GuardedDescriptor(number)
    binary: io.FileIO | io.BufferedWriter = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        binary,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _GuardedDescriptor(io.FileIO):
    """A descriptor that reports its first error of writing, and writes nothing from then on."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._give_up(error)
            return memoryview(data).nbytes

    def _give_up(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self.fileno() == 1 and error.errno != errno.EPIPE:
            print(
                f"hocket: warning: {_NAMES[1]} cannot be written ({error.strerror}): further output to it "
                "is lost, but the command continues",
                file=sys.stderr,
                flush=True,
            )
