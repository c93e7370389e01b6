"""Descriptors of another process of this host, opened through /proc, so that killed processes leave no names behind.

Needs what reading another process's memory would: the same user, or more, and one PID namespace.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple


class Descriptor(NamedTuple):
    """A descriptor of a process, in the form sent to others; JSON.

    Attributes:
        path: its path for others, as long as it is open.
        what: the kernel's name of it, for instance `pipe:[123]`.
    """

    path: str
    what: str

    @classmethod
    def of(cls, number: int) -> Descriptor:
        """Return a descriptor of this process."""
        path = f"/proc/{os.getpid()}/fd/{number}"
        return cls(path, os.readlink(path))

    def open(self, flags: int) -> int:
        """Open the same thing in this process, and return its number here.

        Raises:
            OSError: it cannot be opened, or the path is another process's.
        """
        if os.readlink(self.path) != self.what:
            raise FileNotFoundError(errno.ENOENT, "another process has that process id here", self.path)
        return os.open(self.path, flags | os.O_CLOEXEC)
