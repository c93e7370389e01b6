"""How a job ends when one rank does not reach the end of its script together with the others.

MPI alone hangs there: the others wait for the missing rank for ever, and the missing rank waits for them in
Finalize. Here an uncaught exception or Ctrl-C ends the job at once through MPI_Abort, after the rank, the
step and the cause were printed once. A rank that leaves (`sys.exit`, or the script's end) waits for the others
as long as they do not wait for it; if they do, it ends the job and says so.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hocket.errors import ExchangeTimeoutError, HocketError, PeerLostError, UserError
from hocket.transport.launching import note_ending
from hocket.transport.mpi.board import Board, Row, State
from hocket.transport.mpi.stall import summarise

if TYPE_CHECKING:
    from hocket.transport.mpi.peer import MPIPeer

__all__ = ["Endings", "end_job"]

#: A rank that is waited for may take this long to leave together with the others, in seconds.
LEAVING_GRACE_S = 5.0

# So long apart, two ranks that fail know of each other.
_STAGGER_S = 0.05
_GIVING_UP_S = 0.3
_POLL_S = 0.02


def end_job(message: str, code: int) -> NoReturn:
    """Print `message` and end all ranks with exit status `code`."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{message.rstrip()}\n".encode())
    note_ending(code)
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

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        step = self._board.step if self._board else 0
        if self._board:
            self._wait_for_the_first(self._board, error)
        where = f"hocket: rank {self._peer.rank} at step {step}"
        if isinstance(error, KeyboardInterrupt):
            end_job(f"{where}: interrupted; all ranks end", 130)
        if isinstance(error, UserError):
            end_job(f"{where}: {error}", 2)
        if isinstance(error, (ExchangeTimeoutError, PeerLostError)):
            end_job(f"hocket: at step {step}, {error}; all ranks end", 1)
        if isinstance(error, HocketError):
            end_job(f"{where}: {type(error).__name__}: {error}", 1)
        lines = "".join(traceback.format_exception(kind, error, trace))
        end_job(f"{lines}{where}: {kind.__name__}: {error}; all ranks end", 1)

    def _wait_for_the_first(self, board: Board, error: BaseException | None) -> None:
        """Return at once on the rank that speaks for all; elsewhere leave it time to end the job.

        Where all ranks fail alike (a missing file) the first one speaks. Who has waited too long leaves the
        word to whoever has failed otherwise: its wait is rather the consequence.
        """
        if isinstance(error, ExchangeTimeoutError):
            row = board.own()
            self._announce(board, State.GAVE_UP, _GIVING_UP_S, row.lane, row.what)
        self._announce(board, State.FAILED, _STAGGER_S)

    def _announce(self, board: Board, state: State, seconds: float, lane: str = "", what: str = "") -> None:
        """Say so, give ranks that do the same at this moment as long, and let those that were first go first."""
        board.write(state, lane, what)
        mine = _precedence(board.own())
        time.sleep(seconds)
        failed = [row for row in board.others() if row.state in (State.FAILED, State.GAVE_UP)]
        if any(_precedence(row) < mine for row in failed):
            time.sleep(LEAVING_GRACE_S)

    def _leave(self) -> None:
        """Wait for the others at the end of the script, unless they wait for this rank."""
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        step = self._board.step if self._board else 0
        if self._board:
            self._board.write(State.LEAVING)
        where = f"hocket: rank {self._peer.rank}"
        place = f"rank {self._peer.rank} at the end of its script"
        try:
            leaving = MPI.COMM_WORLD.Ibarrier()
            while not leaving.Test():
                self._peer.failures.check(lambda: place)
                self._peer.host_progress.advance()  # for what was dropped before it was done
                time.sleep(_POLL_S)
                waiting = self._waiting_for_us()
                if waiting and self._board:
                    self._wait_for_the_first(self._board, None)
                    end_job(
                        f"{where} left at step {step} (sys.exit, or the end of its script) while {waiting}; "
                        "all ranks end",
                        1,
                    )
        except KeyboardInterrupt:
            end_job(f"{where} at the end of its script: interrupted; all ranks end", 130)
        except (MPI.Exception, PeerLostError) as error:
            lost = self._peer.failures.explain(place, error) if isinstance(error, MPI.Exception) else error
            if self._board:
                self._wait_for_the_first(self._board, lost)
            end_job(f"hocket: at step {step}, {lost}; all ranks end", 1)

    def _waiting_for_us(self) -> str:
        """Say who waits, once they have waited for some time and nobody computes for whom they may wait."""
        others = self._board.others() if self._board is not None else []
        waiting = [row for row in others if row.state is State.WAITING]
        if not waiting or any(row.state is State.COMPUTING for row in others):
            return ""
        # The last one counts: it may have been waited for until then.
        return (
            summarise(waiting)
            if time.monotonic() - max(row.since_s for row in waiting) > LEAVING_GRACE_S
            else ""
        )


def _precedence(row: Row) -> tuple[bool, float, int]:
    """Return what decides which of several ranks that fail tells why: the one with the least does."""
    return row.state is State.GAVE_UP, row.since_s, row.rank
