"""Sleeping until another process changes a number in memory that both share: Linux's futex(2)."""

from __future__ import annotations

import ctypes
import platform
import sys
import time

__all__ = ["wait_while", "wake"]

# The number of the system call, where that is known; elsewhere who waits sleeps a little and looks again.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_BLIND_SLEEP_S = 0.001


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


if sys.platform == "linux" and sys.byteorder == "little" and _FUTEX is not None:
    _call = ctypes.CDLL(None).syscall  # which leaves the GIL to other threads
    _call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
    ]

    def wait_while(address: int, number: int, longest_s: float) -> None:
        """Sleep while the int64 at `address` is `number`, until `wake` is called for it, or a while.

        Its lower half is what is compared. May return early.
        """
        seconds = int(longest_s)
        limit = _Timespec(seconds, int((longest_s - seconds) * 1e9))
        _call(_FUTEX, address, _WAIT, number & 0xFFFFFFFF, limit)

    def wake(address: int) -> None:
        """Wake all threads of all processes that sleep on the number at `address`, which has been changed."""
        _call(_FUTEX, address, _WAKE, _EVERYBODY, None)

else:

    def wait_while(address: int, number: int, longest_s: float) -> None:
        """Sleep a little."""
        time.sleep(min(longest_s, _BLIND_SLEEP_S))

    def wake(address: int) -> None:
        """Do nothing: nobody sleeps for long."""
