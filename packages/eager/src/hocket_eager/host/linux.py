"""Locks and waits between processes that share memory: glibc's robust mutexes and Linux's futexes, by ctypes.

A mutex is robust: the kernel releases that of a process which has died, and tells whoever comes next. A futex lets a
process sleep until another says that a number in shared memory has changed; it costs nothing meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time

from hocket.api import Array

__all__ = ["MUTEX_BYTES", "Futex", "OwnerDiedError", "RobustMutex", "is_available"]

#: A pthread_mutex_t takes 40 bytes on x86-64 and 48 on others.
MUTEX_BYTES = 64

# Numbers of the system call, by machine.
_NUMBER = ctypes.c_long({"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 0))
_WAIT, _WAKE, _ZERO = ctypes.c_int(0), ctypes.c_int(1), ctypes.c_int(0)
_EVERYBODY = ctypes.c_int(2**31 - 1)
_PROCESS_SHARED, _ROBUST = 1, 1

# Calls through the first keep the interpreter's lock, and are for what does not block.
_at_once = ctypes.PyDLL(None, use_errno=True)
_blocking = ctypes.CDLL(None, use_errno=True)


class OwnerDiedError(Exception):
    """The process that held a mutex has died; what it guards may be half done."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def is_available() -> bool:
    """Return whether this system has them; the same on all processes of a host."""
    return bool(_NUMBER.value) and hasattr(_at_once, "pthread_mutexattr_setrobust")


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
        """Make the memory a mutex; by one process, before any uses it."""
        attributes = ctypes.create_string_buffer(64)
        _at_once.pthread_mutexattr_init(attributes)
        _at_once.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        _at_once.pthread_mutexattr_setrobust(attributes, _ROBUST)
        status = _at_once.pthread_mutex_init(self._address, attributes)
        if status:
            raise OSError(status, os.strerror(status))

    def acquire(self, longest_s: float) -> bool:
        """Take the lock, and return whether that was possible within `longest_s`.

        Raises:
            OwnerDiedError: who held it has died, now or before; it is not taken, and will not be any more.
        """
        status = _at_once.pthread_mutex_trylock(self._address)
        if status == errno.EBUSY and longest_s > 0:
            until = _timespec(time.time() + longest_s)
            status = _blocking.pthread_mutex_timedlock(self._address, ctypes.byref(until))
        if status == errno.EOWNERDEAD:
            # Released without being declared consistent: nobody gets it any more, and everybody is told.
            _at_once.pthread_mutex_unlock(self._address)
        if status in (errno.EOWNERDEAD, errno.ENOTRECOVERABLE):
            raise OwnerDiedError
        if status not in (0, errno.EBUSY, errno.ETIMEDOUT):
            raise OSError(status, os.strerror(status))
        return status == 0

    def release(self) -> None:
        """Give the lock back; by the thread that took it."""
        _at_once.pthread_mutex_unlock(self._address)


class Futex:
    """A number in shared memory, for whose change processes sleep.

    Args:
        word: uint32 [1] in memory that is shared.
    """

    __slots__ = ("_address", "_word")

    def __init__(self, word: Array) -> None:
        self._word = word
        self._address = ctypes.c_void_p(word.ctypes.data)

    def wait(self, value: int, longest_s: float) -> None:
        """Sleep until another process calls `wake_all`, at most `longest_s`; not if the number is not `value` any more.

        It may return for no reason.

        Args:
            value: what it held when the caller looked.
            longest_s: seconds.
        """
        until = ctypes.byref(_timespec(longest_s))
        _blocking.syscall(_NUMBER, self._address, _WAIT, ctypes.c_uint32(value), until, None, _ZERO)

    def wake_all(self) -> None:
        """Wake all that wait for the number, which has been changed before."""
        _at_once.syscall(_NUMBER, self._address, _WAKE, _EVERYBODY, None, None, _ZERO)
