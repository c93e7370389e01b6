"""Progress from the training thread: what is under way is looked at whenever a gradient arrives.

Source: GossipGraD (Daily et al. 2018), sec. 5.1, which calls MPI_Testall between layers; eager-SGD (Li et al.),
sec. 4.3, "on the application thread (i.e., when the application enters the library)".
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from hocket.errors import ExchangeTimeoutError
from hocket.progress.engine import ProgressEngine
from hocket.transport.threads import describe_wait
from hocket.transport.waiting import CHECK_EVERY_S, STALL_REPORT_AFTER_S

__all__ = ["InlineProgress"]


class InlineProgress(ProgressEngine):
    """Activities go on in `advance` and while their application waits for one, and only then.

    So a rank that computes answers nobody: partial collectives need `ThreadProgress`.
    """

    def advance(self) -> None:
        super().advance()
        self.nudge()

    def nudge(self) -> None:
        if self._wake is not None:
            self.check()
            self.step(0)

    def _wait(self, over: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None) -> None:
        peer = self._peer
        assert peer is not None
        longest_s = peer.timeout_s if timeout_s is None else timeout_s
        start_s = peer.clock.now()
        reported = False
        while not over():
            waited_s = peer.clock.now() - start_s
            if waited_s >= longest_s:
                raise ExchangeTimeoutError(describe_wait(peer, describe(), f"no end after {longest_s:g} s"))
            if waited_s > STALL_REPORT_AFTER_S and not reported:
                reported = True
                report = describe_wait(peer, describe(), f"for {waited_s:.0f} s so far")
                print(f"hocket: {report}", file=sys.stderr, flush=True)
            peer.status.check_lost()
            self.step(min(longest_s - waited_s, CHECK_EVERY_S))
