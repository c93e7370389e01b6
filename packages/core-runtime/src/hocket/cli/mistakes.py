"""The end of a command by a mistake: one message, without a traceback."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from hocket.errors import HocketError, UserError, reason

# Open MPI's mpiexec ends the others within 0.2 s of the first exit with an error.
_RANK_0_REPORTS_S = 2.0


@contextmanager
def mistakes_reported() -> Iterator[None]:
    """Run a command; a user's mistake ends the process with one message and exit status 2."""
    try:
        os.getcwd()
    except OSError as error:
        print(
            f"hocket: the working directory no longer exists ({error.strerror}): cd to another one",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        yield
    except click.ClickException as error:
        _let_rank_0_report()
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        if _has_joined():
            raise KeyboardInterrupt from None
        print("hocket: interrupted", file=sys.stderr)
        sys.exit(130)
    except PermissionError as error:
        if _has_joined() or error.filename is None:
            raise
        _end(f"{error.filename} belongs to another user, or is protected: {reason(error)}")
    except HocketError as error:
        if _has_joined():
            raise
        if isinstance(error, UserError):
            _end(str(error))
        _end(f"{type(error).__name__}: {error}", status=1)


def _has_joined() -> bool:
    from hocket.launch.joining import has_joined  # loads NumPy, which --help does not need

    return has_joined()


def _end(message: str, status: int = 2) -> NoReturn:
    _let_rank_0_report()
    print(f"hocket: {message}", file=sys.stderr)
    sys.exit(status)


def _let_rank_0_report() -> None:
    """Leave rank 0 time to report an error of all ranks: at the first exit the launcher ends all."""
    from hocket.launch.joining import speaks_first

    if not speaks_first():
        time.sleep(_RANK_0_REPORTS_S)
