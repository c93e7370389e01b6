"""From a strategy's exchanges to open ones: scopes, segments, buffers and channels; collective in all it does."""

from __future__ import annotations

from torch import Tensor

from hocket.compressor import NoCompression
from hocket.errors import CompositionError
from hocket.progress import InlineProgress
from hocket.segment.partition import Span, partition
from hocket.segment.segment import Segment, allocate
from hocket.segment.storage import ParameterStorage
from hocket.session.exchanging import Counters, OpenExchange
from hocket.session.gradients import GradientMoment, gradient_segment
from hocket.session.layout import parameter_layout
from hocket.session.parameters import ParameterExchange, ParameterMoment
from hocket.session.weights import BatchWeights
from hocket.strategy.exchange import Exchange, Overlap
from hocket.strategy.strategy import Strategy
from hocket.transport.peer import Peer

__all__ = ["Opening"]


class Opening:
    """Opens exchanges for one session, in the strategy's order, which is the same on every rank.

    Attributes:
        opened: all of them so far; exchanges over a single rank are left out, as they change nothing.
    """

    def __init__(self, peer: Peer, storage: ParameterStorage, counters: Counters) -> None:
        self.opened: list[OpenExchange] = []
        self._peer = peer
        self._storage = storage
        self._counters = counters
        self._progress = InlineProgress()

    def gradients(self, strategy: Strategy, weights: BatchWeights) -> GradientMoment | None:
        """Open the gradients slot; None where nothing of it is exchanged with other ranks."""
        for exchange, peer in self._scopes(strategy.gradients):
            cut = partition(self._storage.spans, exchange.segments, backward=True)
            segments = [
                gradient_segment(_name(exchange, i), i, spans, self._peer) for i, spans in enumerate(cut)
            ]
            return GradientMoment(
                self._storage.parameters,
                self._open(exchange, peer, segments),
                weights.contribution,
                self._storage.check,
            )
        return None

    def parameters(self, strategy: Strategy) -> ParameterMoment:
        """Open the parameters slot."""
        exchanges = []
        for exchange, peer in self._scopes(strategy.parameters):
            cut = partition(self._storage.spans, exchange.segments)
            targets = [self._storage.slice_for(spans) for spans in cut]
            segments = [
                _parameter_segment(_name(exchange, i), i, spans, target, self._peer, exchange.overlap)
                for i, (spans, target) in enumerate(zip(cut, targets, strict=True))
            ]
            exchanges.append(
                ParameterExchange(self._open(exchange, peer, segments), targets, self._peer.rank)
            )
        return ParameterMoment(exchanges)

    def _scopes(self, exchanges: tuple[Exchange, ...]) -> list[tuple[Exchange, Peer]]:
        """Return the exchanges in which this rank meets another one, with its endpoint in their scope."""
        found = []
        for exchange in exchanges:
            peer = exchange.over.peer_for(self._peer)
            if peer is not None and peer.size > 1:
                found.append((exchange, peer))
        return found

    def _open(self, exchange: Exchange, peer: Peer, segments: list[Segment]) -> OpenExchange:
        if not isinstance(exchange.compressor, NoCompression):
            raise CompositionError(
                f"{exchange.name}.compressor: no collective of this version carries compressed messages: use none. "
                "Compressors can be handed to DistributedDataParallel (hocket.compressor.ddp)"
            )
        channel = exchange.collective.open(peer, segments, self._progress, exchange)
        opened = OpenExchange(exchange, peer, segments, channel, self._progress, self._counters)
        self.opened.append(opened)
        return opened


def _name(exchange: Exchange, index: int) -> str:
    return f"{exchange.name}[{index}]"


def _parameter_segment(
    name: str, index: int, spans: list[Span], target: Tensor, peer: Peer, overlap: Overlap
) -> Segment:
    layout = parameter_layout(spans, overlap)
    outgoing, incoming = target, allocate(peer, layout.numel, layout.dtype, target.device)
    if layout.own_outgoing:
        outgoing = allocate(peer, layout.numel, layout.dtype, target.device)
    return Segment(name, index, spans, outgoing, incoming)
