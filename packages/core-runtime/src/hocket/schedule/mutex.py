"""A lock that Python and compiled code take alike."""

from __future__ import annotations

import ctypes

import numpy as np

__all__ = ["Mutex"]

# Calls of the one let go of the GIL, and have to wait for it again; calls of the other keep it.
_waiting, _at_once = ctypes.CDLL(None), ctypes.PyDLL(None)
# A pthread_mutex_t takes 40 bytes on Linux, 64 on macOS.
_WORDS = 8


class Mutex:
    """A POSIX mutex, for what a schedule's `Copy` and the application both touch; a context manager.

    Who waits for it does not hold the GIL. It is not reentrant.

    Attributes:
        address: where the pthread_mutex_t lies.
    """

    def __init__(self) -> None:
        self._memory = np.zeros(_WORDS, np.int64)
        self.address = self._memory.ctypes.data
        self._pointer = ctypes.c_void_p(self.address)
        _at_once.pthread_mutex_init(self._pointer, None)

    def __enter__(self) -> None:
        # Who holds it must not wait for the GIL: compiled code, and with it other ranks, would wait for that too.
        if _at_once.pthread_mutex_trylock(self._pointer) != 0:
            _waiting.pthread_mutex_lock(self._pointer)

    def __exit__(self, *_: object) -> None:
        _at_once.pthread_mutex_unlock(self._pointer)
