"""Messages about work that takes long, so that it does not look stuck."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

_AFTER_S = 10.0


@contextlib.contextmanager
def speaking_after(seconds: float, speak: Callable[[], None]) -> Iterator[None]:
    """Surround work, and call `speak()`, from another thread, if it takes longer than `seconds`."""
    timer = threading.Timer(seconds, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def saying_it_goes_on(what: str) -> contextlib.AbstractContextManager[None]:
    """Surround work that may take long for many ranks, and say so on standard error if it does."""
    text = f"hocket: still {what}, which takes longer with more ranks"
    return speaking_after(_AFTER_S, lambda: print(text, file=sys.stderr, flush=True))
