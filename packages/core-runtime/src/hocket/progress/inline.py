"""Progress from the training thread, which looks at operations under way whenever a gradient arrives.

Source: GossipGraD (Daily et al. 2018), sec. 5.1, which calls MPI_Testall between layers; eager-SGD (Li et al.),
sec. 4.3, "on the application thread (i.e., when the application enters the library)".
"""

from __future__ import annotations

from collections.abc import Callable

from hocket.progress.engine import ProgressEngine
from hocket.transport.threads import wait_until
from hocket.transport.waiting import back_off_s


class InlineProgress(ProgressEngine):
    """An engine whose activities run only in `advance`, and while their application waits for one.

    So a rank that computes answers no other: partial collectives need `ThreadProgress`.
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

        def sleep(waited_s: float, longest_s: float) -> None:
            peer.progress.advance()
            self.step(min(back_off_s(waited_s), longest_s) if peer.progress.busy else longest_s)

        wait_until(peer, over, describe, timeout_s, sleep, now=peer.clock.now)
