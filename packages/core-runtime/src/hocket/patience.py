"""A word where something takes long, so that nobody takes it for stuck."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

__all__ = ["saying_it_goes_on", "speaking_after"]

_AFTER_S = 10.0


@contextlib.contextmanager
def speaking_after(seconds: float, speak: Callable[[], None]) -> Iterator[None]:
    """Surround what may take long, and call `speak()`, from another thread, when it does."""
    timer = threading.Timer(seconds, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def saying_it_goes_on(what: str) -> contextlib.AbstractContextManager[None]:
    """Surround what may take long for many ranks, and say so on standard error when it does."""
    told = f"hocket: {what} goes on: the more ranks, the longer it takes"
    return speaking_after(_AFTER_S, lambda: print(told, file=sys.stderr, flush=True))
