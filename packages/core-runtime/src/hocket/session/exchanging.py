"""One exchange of a strategy while it is attached: its channel, its segments and its counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.collective.api import Channel, Outcome
from hocket.progress import ProgressEngine
from hocket.segment.segment import Segment
from hocket.strategy.exchange import Exchange
from hocket.transport.peer import Peer, Request

__all__ = ["Counters", "OpenExchange"]


@dataclass
class Counters:
    """What a session has spent on communication so far.

    Attributes:
        bytes_sent: by this rank, as the collectives' algorithms count them.
        exposed_wait_s: seconds in which the training thread waited for an exchange.
        exchanges: how many segments were exchanged.
    """

    bytes_sent: float = 0.0
    exposed_wait_s: float = 0.0
    exchanges: int = 0


@dataclass
class OpenExchange:
    """An exchange over this rank's scope.

    Attributes:
        exchange: what the strategy says.
        peer: this rank's endpoint in the exchange's scope.
        segments: what is exchanged, piece by piece.
        round: how many times the exchange has been carried out.
        scale: what a contribution is multiplied by, so that the combination is a mean.
    """

    exchange: Exchange
    peer: Peer
    segments: Sequence[Segment]
    channel: Channel
    progress: ProgressEngine
    counters: Counters
    round: int = 0
    scale: float = 1.0
    _requests: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scale = self.exchange.collective.contribution_scale(self.peer.size)

    def started(self, segment: Segment) -> bool:
        """Return whether this round's exchange of `segment` is under way."""
        return segment.index in self._requests

    def start(self, segment: Segment) -> None:
        """Send `segment.outgoing`, from now on not to be written, in this round."""
        segment.stage_out()
        request = self.channel.start(segment, self.round)
        self._requests[segment.index] = request
        self.progress.watch(request)
        exchange = self.exchange
        message_bytes = exchange.compressor.payload_bytes(segment)
        self.counters.bytes_sent += exchange.collective.bytes_per_round(
            message_bytes, self.peer.size, exchange.topology
        )
        self.counters.exchanges += 1

    def wait(self, segment: Segment) -> Outcome:
        """Wait until this round's exchange of `segment` is done.

        Raises:
            ExchangeTimeoutError: some rank did not answer in time.
        """
        start_s = self.peer.now()
        outcome: Outcome = self._requests[segment.index].wait()
        self.counters.exposed_wait_s += self.peer.now() - start_s
        return outcome

    def finish(self, segment: Segment) -> Outcome:
        """Wait until `segment.incoming` holds this round's combination, and be ready for the next round."""
        outcome = self.wait(segment)
        del self._requests[segment.index]
        segment.stage_in()
        return outcome

    def end_round(self) -> None:
        """Count the round, once all segments are finished."""
        self.round += 1

    @property
    def idle(self) -> bool:
        """Whether nothing of this exchange is under way."""
        return not self._requests
