"""The end of a job in which one rank does not reach its script's end with the others.

Otherwise such a job hangs: the others wait for the missing rank forever, and with MPI the missing rank waits for them
in Finalize. Here an uncaught exception or Ctrl-C ends the job at once, after the rank, the step and the cause were
printed once. A rank that leaves (`sys.exit`, or the script's end) waits for the others
as long as they do not wait for it; if they do, it ends the job and says so.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
import traceback
import zlib
from multiprocessing.util import Finalize
from types import TracebackType
from typing import NoReturn

from hocket.errors import (
    ExchangeTimeoutError,
    HocketError,
    NonFiniteElsewhereError,
    PeerLostError,
    SessionLeftError,
    TransportError,
    UserError,
)
from hocket.transport import forks
from hocket.transport.host.peer import HostPeer
from hocket.transport.host.status import StatusBoard
from hocket.transport.job_notes import note_ending, note_leaving
from hocket.transport.status import READS, RankState, RankStatus, summarise

#: A rank that is waited for may take this long to leave together with the others, in seconds.
LEAVING_GRACE_S = 5.0

# So long apart, two ranks that fail know of each other.
_STAGGER_S = 0.05
_GIVING_UP_S = 0.3
_POLL_S = 0.02

# Among what ends a process of multiprocessing: its exception is known then.
_BEFORE_OTHERS = 100

# Who raises it leaves the word to the rank that it is about.
_FROM_ANOTHER = (NonFiniteElsewhereError, SessionLeftError)

#: In a message: the rank that reports, or all, where they fail alike.
_WHO = "\0who\0"


def announce(message: str, code: int) -> None:
    """Print `message`, if any, and note for the launcher that this rank ends all ranks with exit status `code`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if message:
        os.write(2, f"{message.rstrip()}\n".encode())
    note_ending(code)
    time.sleep(_STAGGER_S)  # the launcher forwards what was written before it hears of the end


class Endings:
    """The handlers of this rank's end: uncaught exceptions, and the script's end.

    Args:
        peer: its endpoint in the job.
    """

    def __init__(self, peer: HostPeer) -> None:
        self._peer = peer
        self._board = peer.status.board
        self._previous_hook = sys.excepthook

    def install(self) -> None:
        """Take over `sys.excepthook`, and the end of the script."""
        sys.excepthook = self._uncaught
        if multiprocessing.parent_process() is not None:
            # There no hook hears of what ends the function: it is told to the parent, once the process has ended.
            Finalize(None, self._spawned_ends, exitpriority=_BEFORE_OTHERS)
        atexit.register(self._leave)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if forks.forked:
            self._previous_hook(kind, error, trace)
            return
        try:
            self._tell(kind, error, trace)
        except (
            Exception
        ) as later:  # of a signal's handler: torch's raises where a worker of a DataLoader has died
            later.__context__ = later.__context__ or error
            self._tell(type(later), later, later.__traceback__)

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        """End the job with a line on an uncaught exception."""
        step = self._board.step if self._board else 0
        if isinstance(error, KeyboardInterrupt):
            self._end(error, f"hocket: {_WHO} at step {step}: interrupted; all ranks end", 130)
        if isinstance(error, UserError):
            self._end(error, f"hocket: {_WHO} at step {step}: {error}", 2)
        if isinstance(error, (ExchangeTimeoutError, PeerLostError)):
            self._end(error, f"hocket: at step {step}, {error}; all ranks end", 1)
        if isinstance(error, HocketError):
            self._end(error, f"hocket: {_WHO} at step {step}: {type(error).__name__}: {error}", 1)
        lines = "".join(traceback.format_exception(kind, error, trace))
        place = f"at step {step}" + f", {READS}" * (READS in getattr(error, "__notes__", ()))
        self._end(error, f"{lines}hocket: {_WHO} {place}: {_cause(error)}; all ranks end", 1)

    def _spawned_ends(self) -> None:
        """End the job at once where an exception ends a process of multiprocessing, or of torch's `spawn`."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if _is_of_spawn(error) else None
        if error is not None:
            self._uncaught(type(error), error, error.__traceback__)

    def _end(self, error: BaseException | None, message: str, code: int) -> NoReturn:
        """End the job with `message`, or silently if another rank has reported the cause."""
        text = str(error).replace(f"rank {self._peer.rank}", "rank")  # each names itself
        digest = f"{type(error).__name__} {zlib.crc32(text.encode()):08x}"
        reports = self._board is None or self._may_report(self._board, error, digest)
        who = "all ranks" if self._board and _fail_alike(self._board, digest) else f"rank {self._peer.rank}"
        self._peer.abort(message.replace(_WHO, who) if reports else "", code)

    def _may_report(self, board: StatusBoard, error: BaseException | None, digest: str) -> bool:
        """Return whether this rank reports the cause; on other ranks, leave it time to end the job.

        Where all ranks fail alike (a missing file) the first one reports. A rank that has waited too long leaves the
        report to one with another error, as its wait is rather the consequence. A rank with another rank's NaN leaves
        it to that one.
        """
        if isinstance(error, (ExchangeTimeoutError, *_FROM_ANOTHER)):
            row = board.own()
            certain = isinstance(error, _FROM_ANOTHER)
            seconds = LEAVING_GRACE_S if certain else _GIVING_UP_S
            if not self._announce(board, RankState.GAVE_UP, seconds, row.lane, row.what):
                return False
        return self._announce(board, RankState.FAILED, _STAGGER_S, what=digest)

    def _announce(
        self, board: StatusBoard, state: RankState, seconds: float, lane: str = "", what: str = ""
    ) -> bool:
        """Show the state, wait for ranks that fail at the same moment, and let earlier ones report.

        Returns:
            Whether no other rank reports, or is about to report, the cause.
        """
        board.write(state, lane, what)
        mine = _precedence(board.own())
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not any(_has_failed(row) for row in board.others()):
            self._peer.pause(_POLL_S)
        self._peer.pause(max(0.0, min(end_s - time.monotonic(), _STAGGER_S)))
        if any(_goes_first(row, mine) for row in board.others()):
            # The launcher ends this rank meanwhile, or is slow: Open MPI's has been seen to take longer.
            self._peer.pause(LEAVING_GRACE_S)
            return not any(row.state is RankState.TELLING for row in board.others())
        if state is RankState.FAILED:
            board.write(RankState.TELLING)
        return True

    def _leave(self) -> None:
        """Wait for the others at the end of the script, unless they wait for this rank."""
        if forks.forked:
            return
        step = self._board.step if self._board else 0
        if self._board:
            self._board.write(RankState.LEAVING)
        where = f"hocket: rank {self._peer.rank}"
        place = f"rank {self._peer.rank} at the end of its script"
        try:
            leaving = self._peer.leave(place)
            while not leaving.done():
                self._peer.status.check(lambda: place)
                self._peer.progress.advance()  # for what was dropped before it was done
                time.sleep(_POLL_S)
                waiting = self._waiting_for_us()
                if waiting:
                    self._end(
                        None,
                        f"{where} ended at step {step} (sys.exit, or the end of its script) while "
                        f"{waiting}; all ranks end",
                        1,
                    )
            note_leaving()
        except KeyboardInterrupt:
            self._peer.abort(f"{where} at the end of its script: interrupted; all ranks end", 130)
        except TransportError as error:
            self._end(error, f"hocket: at step {step}, {error}; all ranks end", 1)

    def _waiting_for_us(self) -> str:
        """Return a description of ranks that wait for this one; empty if none do, or while others compute."""
        others = self._board.others() if self._board is not None else []
        waiting = [row for row in others if row.state is RankState.WAITING]
        if not waiting or any(row.state is RankState.COMPUTING for row in others):
            return ""
        # The last one counts: it may have been waited for until then.
        return (
            summarise(waiting)
            if time.monotonic() - max(row.since_s for row in waiting) > LEAVING_GRACE_S
            else ""
        )


def _cause(error: BaseException) -> str:
    """Return an exception in a line: its type, and the first line of its text. All of it is shown above."""
    first, *others = str(error).strip().splitlines() or [""]
    parts = [type(error).__name__, first.rstrip(" .:")]
    if others and others[0].startswith("Original Traceback"):  # torch's, of a loader's worker
        parts = [parts[1], others[-1]]
    return ": ".join(filter(None, parts))


def _is_of_spawn(error: SystemExit) -> bool:
    """Return whether torch.multiprocessing's `spawn` has made an exit of the function's exception."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == "torch.multiprocessing.spawn"


def _fail_alike(board: StatusBoard, digest: str) -> bool:
    """Return whether all other ranks, at least one, have failed with the error of this digest."""
    others = board.others()
    return bool(others) and all(row.state is RankState.FAILED and row.what == digest for row in others)


def _has_failed(row: RankStatus) -> bool:
    return row.state in (RankState.FAILED, RankState.TELLING)


def _goes_first(row: RankStatus, mine: tuple[bool, float, int]) -> bool:
    """Return whether a rank reports the cause before the one with the precedence `mine`."""
    failed = row.state in (RankState.FAILED, RankState.GAVE_UP)
    return row.state is RankState.TELLING or (failed and _precedence(row) < mine)


def _precedence(row: RankStatus) -> tuple[bool, float, int]:
    """Return a failed rank's precedence; the rank with the least reports the cause."""
    return row.state is RankState.GAVE_UP, row.since_s, row.rank
