"""Locks and waits between processes that share memory: glibc's robust mutexes and Linux's futexes, by ctypes.

A mutex is robust: the kernel releases a dead process's, and notifies the next one. A futex lets a process
sleep until another has changed a number in shared memory; it costs nothing meanwhile. No function here is a fence:
memory is shared only where the processor keeps the order of writes (`memory.py`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time

from hocket.arrays import Array

#: A pthread_mutex_t takes 40 bytes on x86-64 and 48 on others.
MUTEX_BYTES = 64

# The number of the system call, where that is known; elsewhere a wait sleeps a little and looks again.
_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_HAS_FUTEX = sys.platform == "linux" and sys.byteorder == "little" and _NUMBER is not None
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_BLIND_SLEEP_S = 0.001
_PROCESS_SHARED, _ROBUST = 1, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Calls through the first keep the interpreter's lock, and are for what does not block.
_at_once = ctypes.PyDLL(None, use_errno=True)
_blocking = ctypes.CDLL(None, use_errno=True)
for _library in (_at_once, _blocking) if _HAS_FUTEX else ():
    _library.syscall.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
    ]


class OwnerDiedError(Exception):
    """The death of a process that held a mutex; the guarded data may be half written."""


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def is_available() -> bool:
    """Return whether this system has robust mutexes and futexes; the same on all processes of a host."""
    return _HAS_FUTEX and hasattr(_at_once, "pthread_mutexattr_setrobust")


def wait_while(address: int, number: int, longest_s: float) -> None:
    """Sleep while the number at `address` is `number`, until a call of `wake`, or for `longest_s` seconds.

    Of an int64 the lower half is compared. It may return early without a reason.
    """
    if _HAS_FUTEX:
        _blocking.syscall(_NUMBER, address, _WAIT, number & 0xFFFFFFFF, _timespec(longest_s))
    else:
        time.sleep(min(longest_s, _BLIND_SLEEP_S))


def wake(address: int) -> None:
    """Wake all threads of all processes that sleep on the number at `address`, which has been changed."""
    if _HAS_FUTEX:
        _at_once.syscall(_NUMBER, address, _WAKE, _EVERYBODY, None)


class RobustMutex:
    """A lock between processes.

    Args:
        memory: MUTEX_BYTES bytes, uint8, shared by all of them and 64-byte aligned.
    """

    __slots__ = ("_address", "_memory")

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self._address = ctypes.c_void_p(memory.ctypes.data)

    def initialise(self) -> None:
        """Initialise the memory as a mutex; one process calls it before any uses it."""
        attributes = ctypes.create_string_buffer(64)
        _at_once.pthread_mutexattr_init(attributes)
        _at_once.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        _at_once.pthread_mutexattr_setrobust(attributes, _ROBUST)
        status = _at_once.pthread_mutex_init(self._address, attributes)
        if status:
            raise OSError(status, os.strerror(status))

    def acquire(self, longest_s: float) -> bool:
        """Take the lock, and return whether that succeeded within `longest_s` seconds.

        Raises:
            OwnerDiedError: its holder has died, now or before; the lock is not taken, and never will be again.
        """
        status: int = _at_once.pthread_mutex_trylock(self._address)
        if status == errno.EBUSY and longest_s > 0:
            until = _timespec(time.time() + longest_s)
            status = _blocking.pthread_mutex_timedlock(self._address, ctypes.byref(until))
        if status == errno.EOWNERDEAD:
            # Released without being declared consistent: no process can take it any more, and each gets an error.
            _at_once.pthread_mutex_unlock(self._address)
        if status in (errno.EOWNERDEAD, errno.ENOTRECOVERABLE):
            raise OwnerDiedError
        if status not in (0, errno.EBUSY, errno.ETIMEDOUT):
            raise OSError(status, os.strerror(status))
        return status == 0

    def release(self) -> None:
        """Release the lock; called by the thread that took it."""
        _at_once.pthread_mutex_unlock(self._address)
