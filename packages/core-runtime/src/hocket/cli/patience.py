"""A word where a command computes for long, so that nobody takes it for stuck."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

__all__ = ["saying_it_goes_on"]

_AFTER_S = 10.0


@contextlib.contextmanager
def saying_it_goes_on(what: str) -> Iterator[None]:
    """Surround what may take long for many ranks, and say so on standard error when it does."""

    def say() -> None:
        print(f"hocket: {what} goes on: the more ranks, the longer it takes", file=sys.stderr, flush=True)

    timer = threading.Timer(_AFTER_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
