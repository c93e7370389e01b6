"""Processes that a rank forks: they are no ranks, and must not use their parent's transport."""

from __future__ import annotations

import os
import sys

from hocket.errors import TransportError

_rank = False

#: Whether this process was forked by a rank, or by one that had started MPI.
forked = False


def note_rank() -> None:
    """Note that this process is a rank of a job; processes that it forks are not."""
    global _rank
    _rank = True


def explain() -> TransportError:
    """Return the error of a forked process that exchanges: its messages would be taken for its parent's."""
    return TransportError(
        f"process {os.getpid()} was forked by a rank of a job, but is not a rank itself: exchange only in "
        "the rank, or start the process with multiprocessing's `spawn`"
    )


def _note_fork() -> None:
    global forked
    forked = forked or _rank or "mpi4py.MPI" in sys.modules  # whose import starts MPI


os.register_at_fork(after_in_child=_note_fork)
