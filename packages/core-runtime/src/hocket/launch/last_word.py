"""The last line of a rank that ends before it has joined the others, as for an unknown recipe."""

from __future__ import annotations

import os
import sys
import time

from hocket.errors import HocketError, UserError
from hocket.launch.joining import launched, launched_rank, speaks_first
from hocket.transport import forks
from hocket.transport.job_notes import PID_FOLDER_VARIABLE, note_ending, was_started_by_rank

# Of several ranks with one mistake the first reports it; with its exit a launcher ends the others.
_FIRST_SPEAKS_S = 2.0


def say_why(error: HocketError) -> None:
    """Print an error and end a launched process, with status 2 for a user's mistake, else 1.

    Raises:
        SystemExit: this process is a launched rank; other processes print nothing.
    """
    if not _is_rank():
        return
    if not speaks_first():
        time.sleep(_FIRST_SPEAKS_S)
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    sys.stderr.flush()
    # Not to `sys.stderr`: where the script has a process group of torch's, that is torch's own, which is thrown away.
    os.write(2, f"hocket: rank {launched_rank()}: {message}\n".encode())
    code = 2 if isinstance(error, UserError) else 1
    note_ending(code)
    raise SystemExit(code)


def _is_rank() -> bool:
    try:
        is_launched = launched() is not None or PID_FOLDER_VARIABLE in os.environ  # a single rank has no more
        return is_launched and not (forks.forked or was_started_by_rank())
    except UserError:  # of variables that do not belong together, which the error is about
        return True
