"""How a job ends when one rank does not reach the end of its script together with the others.

MPI alone hangs there: the others wait for the missing rank for ever, and the missing rank waits for them in
Finalize. Here an uncaught exception or Ctrl-C ends the job at once through MPI_Abort, after the rank, the step
and the cause were printed once. A rank that leaves (`sys.exit`, or the script's end) waits for the others as
long as they do not wait for it; if they do, it ends the job and says so.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hocket.errors import HocketError, UserError
from hocket.transport.mpi.board import Board, State

if TYPE_CHECKING:
    from hocket.transport.mpi.peer import MPIPeer

__all__ = ["Endings", "end_job"]

#: A rank that is waited for may take this long to leave together with the others, in seconds.
LEAVING_GRACE_S = 5.0

_STAGGER_S = 0.05
_POLL_S = 0.02


def end_job(message: str, code: int) -> NoReturn:
    """Print `message` and end all ranks with exit status `code`."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{message.rstrip()}\n".encode())
    time.sleep(_STAGGER_S)  # the launcher forwards what was written before it hears of the abort
    MPI.COMM_WORLD.Abort(code)
    raise SystemExit(code)


class Endings:
    """Watches over how this rank ends."""

    def __init__(self, peer: MPIPeer, board: Board | None) -> None:
        self._peer = peer
        self._board = board
        self._previous_hook = sys.excepthook

    def install(self) -> None:
        """Take over `sys.excepthook`, and the end of the script."""
        sys.excepthook = self._uncaught
        atexit.register(self._leave)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        step = self._board.step if self._board else 0
        if self._board:
            self._board.write(State.FAILED)
            # Where all ranks fail alike (a missing file), the lowest one speaks for all.
            time.sleep(_STAGGER_S * min(self._peer.rank, 20))
            if any(row.state == State.FAILED and row.rank < self._peer.rank for row in self._board.others()):
                time.sleep(LEAVING_GRACE_S)
        where = f"hocket: rank {self._peer.rank} at step {step}"
        if isinstance(error, KeyboardInterrupt):
            end_job(f"{where}: interrupted; all ranks end", 130)
        if isinstance(error, UserError):
            end_job(f"{where}: {error}", 2)
        if isinstance(error, HocketError):
            end_job(f"{where}: {type(error).__name__}: {error}", 1)
        lines = "".join(traceback.format_exception(kind, error, trace))
        end_job(f"{lines}{where}: {kind.__name__}: {error}; all ranks end", 1)

    def _leave(self) -> None:
        """Wait for the others at the end of the script, unless they wait for this rank."""
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        step = self._board.step if self._board else 0
        if self._board:
            self._board.write(State.LEAVING)
        leaving = MPI.COMM_WORLD.Ibarrier()
        while not leaving.Test():
            time.sleep(_POLL_S)
            waiting = self._waiting_for_us()
            if waiting:
                end_job(
                    f"hocket: rank {self._peer.rank} left at step {step} (sys.exit, or the end of its script) while "
                    f"{waiting}; all ranks end",
                    1,
                )

    def _waiting_for_us(self) -> str:
        if self._board is None:
            return ""
        now_s = time.monotonic()
        stuck = [
            row
            for row in self._board.others()
            if row.state == State.WAITING and now_s - row.since_s > LEAVING_GRACE_S
        ]
        return "; ".join(str(row) for row in stuck)
