"""Standard output and error that nobody reads any more, or whose disk is full: what is trained goes on without."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

__all__ = ["keep_streams"]

_NAMES = {1: "standard output", 2: "standard error"}


def keep_streams() -> None:
    """Have what cannot be written any more be left out, for the rest of the process; called as it begins.

    A reader that has gone, as `head` does, is no news; of another reason standard error tells once. Numbers 0 to 2 that
    are closed become empty files, as the next file that is opened would be taken for them.
    """
    for number in (0, *_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = _kept(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _kept(sys.stderr, sys.__stderr__, 2)


def _kept(stream: TextIO | None, first: TextIO | None, number: int) -> TextIO:
    """Return a stream like this one that outlives its reader; what others have put in its place stays."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(_Kept(number)), encoding="utf-8", errors="replace")
    if stream is not first or not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream
    stream.flush()
    raw = _Kept(number)
    binary: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        binary,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Kept(io.FileIO):
    """A descriptor whose errors of writing are told once, and then nothing is written."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)

    def write(self, data: Any, /) -> int:
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
                f"hocket: warning: {_NAMES[1]} cannot be written ({error.strerror}): what is said there is lost, and "
                "the command goes on",
                file=sys.stderr,
                flush=True,
            )
