"""The opening of a phase's exchanges: from scopes, segments and buffers to channels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from torch import Tensor

from hocket.errors import AttachError, CompositionError
from hocket.plan.layout import Layout, buffers_of, gradient_layout, parameter_layout
from hocket.progress import InlineProgress, ProgressEngine, ThreadProgress
from hocket.segment.partition import ParameterSpan, partition
from hocket.segment.segment import Segment, allocate
from hocket.segment.shape import wire_dtype
from hocket.segment.storage import ParameterStorage, Pieces
from hocket.session.exchange.active import ActiveExchange, Counters
from hocket.session.exchange.buffers import BufferMean
from hocket.session.exchange.parameter_sync import ParameterSync
from hocket.session.exchange.parameters import ParameterMix
from hocket.session.exchange.segment_state import Stage
from hocket.session.ranks import Endpoints
from hocket.session.save.untrained import UntrainedTensors
from hocket.session.step.gradients import GradientSync
from hocket.session.step.optimizer_terms import AppliedTerms
from hocket.session.step.optimizers import Optimizers
from hocket.session.step.state import StepState
from hocket.session.step.weights import Agreement, Contribution
from hocket.strategy.exchange import GRADIENTS, Buffers, Exchange, ProgressMode
from hocket.strategy.scope import Leaders
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer
from hocket.transport.peer import Peer

_log = logging.getLogger("hocket")


@dataclass(frozen=True)
class _ScopedExchange:
    """An exchange whose ranks are known.

    Attributes:
        parts: the sets of ranks that exchange among themselves.
        peer: this rank's endpoint in its part; None if it takes no part.
    """

    exchange: Exchange
    parts: tuple[tuple[int, ...], ...]
    peer: Peer | None


class PhaseOpener:
    """An opener of one session's exchanges, in the strategy's order, which is the same on every rank.

    Attributes:
        opened: all exchanges opened so far. Exchanges over one rank each are left out, as they change nothing, unless
            they have outer steps.
        progress: advances them.
    """

    def __init__(
        self,
        ranks: Endpoints,
        storage: ParameterStorage,
        strategy: Strategy,
        counters: Counters,
        observer: Observer | None = None,
    ) -> None:
        strategy.check_size(ranks.placement)
        self.opened: list[ActiveExchange] = []
        threaded = any(
            exchange.collective.traits.needs_thread or exchange.progress is ProgressMode.THREAD
            for exchange in strategy.exchanges
        )
        self.progress: ProgressEngine = ThreadProgress() if threaded else InlineProgress()
        self._peer, self._island = ranks.peer, ranks.island
        self._placement = ranks.placement
        self._host = ranks.host
        self._device = ranks.device
        self._storage = storage
        self._strategy = strategy
        self._counters = counters
        self._observer = observer

    def gradients(
        self,
        optimizers: Optimizers,
        begin: Callable[[], Contribution],
        state: StepState,
        *,
        may_skip: bool,
    ) -> GradientSync | None:
        """Open the gradients slot; None where this rank exchanges none.

        Args:
            optimizers: the optimizers that compressors may take terms over from.
            begin, state: as of `GradientSync`.
            may_skip: whether steps with NaN or Inf are left out.
        """
        scopes = self._scopes(self._strategy.gradients)
        if not any(scope.peer is not None for scope in scopes):
            return None
        cut = partition(self._storage.spans, scopes[0].exchange.segments, backward=True)
        exchanges, stages = self._gradient_stages(scopes, cut)
        parameters = self._storage.parameters
        agreement = self._agreement(scopes, len(parameters), exchanges[0])
        terms = None
        compressor = exchanges[0].exchange.compressor
        if compressor is not None and compressor.traits.applies_optimizer_terms:
            assert agreement is not None
            terms = AppliedTerms(optimizers, exchanges[0], parameters, agreement.peer)
        return GradientSync(
            parameters,
            exchanges,
            stages,
            self._strategy.gradients,
            begin,
            state,
            terms,
            agreement,
            self._island,
            may_skip=may_skip,
            several=len(optimizers.given) > 1,
        )

    def _gradient_stages(
        self, scopes: Sequence[_ScopedExchange], cut: Sequence[list[ParameterSpan]]
    ) -> tuple[list[ActiveExchange], list[list[Stage]]]:
        """Open the slot's exchanges; return them, and each segment's way through them."""
        buffers = [self._gradient_buffers(scopes, spans) for spans in cut]
        exchanges: list[ActiveExchange] = []
        stages: list[list[Stage]] = [[] for _ in cut]
        for number, scope in enumerate(scopes):
            if scope.peer is None:
                continue
            segments = []
            for index in self._carried(scope, len(cut)):
                # The exchanges of the slot pass each segment back and forth between two buffers.
                pair = buffers[index] if number % 2 == 0 else buffers[index][::-1]
                name = _name(scope.exchange, index)
                segments.append(Segment(name, index, cut[index], *pair, on_lanes=self._device is not None))
            opened = self._open(scope, scope.peer, segments)
            exchanges.append(opened)
            for segment in segments:
                stages[segment.index].append((opened, segment))
        return exchanges, stages

    def _agreement(
        self, scopes: Sequence[_ScopedExchange], num_parameters: int, first: ActiveExchange
    ) -> Agreement | None:
        """Return the ranks' agreement on their contributions where compressors keep residuals; else None."""
        compressors = [scope.exchange.compressor for scope in scopes]
        if not any(
            compressor and (compressor.traits.keeps_residual or compressor.traits.applies_optimizer_terms)
            for compressor in compressors
        ):
            return None
        peer = scopes[0].peer if len(scopes) == 1 else self._peer
        assert peer is not None  # the first exchange of gradients has all ranks
        # Otherwise no mean over all ranks has a weight that all of them could know before.
        weighs = first.exchange.collective.traits.equal_result
        return Agreement(peer, num_parameters, weighs=weighs, wait_for=first.wait_for)

    def parameters(self, take_values: Callable[[], None], untrained: UntrainedTensors) -> ParameterSync:
        """Open the parameters slot; `take_values` is called before they are sent, and `untrained` knows the buffers."""
        exchanges = []
        for scope in self._scopes(self._strategy.parameters):
            if scope.peer is None:
                continue
            exchange = scope.exchange
            cut = partition(self._storage.spans, exchange.segments)
            carried = self._carried(scope, len(cut))
            exchange.check_segments(len(cut), scope.peer.size)
            places = [self._storage.pieces_of(cut[index]) for index in carried]
            segments = self._parameter_segments(
                exchange, scope.peer, {index: cut[index] for index in carried}, places
            )
            opened = self._open(scope, scope.peer, segments)
            buffers = BufferMean(opened, untrained) if self._averages_buffers(exchange, untrained) else None
            exchanges.append(
                ParameterMix(opened, places, len(cut), take_values, buffers, self._any_frozen, self._island)
            )
        return ParameterSync(exchanges)

    def _any_frozen(self) -> bool:
        return not all(parameter.requires_grad for parameter in self._storage.parameters.values())

    def _averages_buffers(self, exchange: Exchange, untrained: UntrainedTensors) -> bool:
        if exchange.buffers is Buffers.MEAN:
            return True
        left = untrained.statistics()
        if left and exchange.outer is not None and self._island.is_main and self._peer.size > 1:
            cure = f". To average them in each exchange, set {exchange.name}.buffers=mean"
            _log.warning(
                "%s: the model's %d buffers (BatchNorm's statistics) differ between ranks until session.consensus() "
                "averages them%s",
                exchange.name,
                len(left),
                ""
                if isinstance(exchange.over, Leaders)
                else cure,  # the leaders' groups would not get the mean
            )
        return False

    def _scopes(self, exchanges: tuple[Exchange, ...]) -> list[_ScopedExchange]:
        """Return the exchanges in which ranks have something to do, in order."""
        scopes = []
        for exchange in exchanges:
            parts = exchange.over.parts(self._placement)
            if any(exchange.takes_place(len(part)) for part in parts):
                scopes.append(_ScopedExchange(exchange, parts, self._endpoint(exchange)))
        return scopes

    def _endpoint(self, exchange: Exchange) -> Peer | None:
        part = exchange.over.part_of(self._peer.rank, self._placement)
        if part == tuple(range(self._peer.size)):
            return self._peer
        # Collective: a rank that takes no part makes a group of its own, and leaves it.
        group = self._peer.group(part or (self._peer.rank,))
        return None if part is None else group

    def _carried(self, scope: _ScopedExchange, num_segments: int) -> list[int]:
        """Return the numbers of the segments that this rank exchanges in the scope."""
        over, rank = scope.exchange.over, self._peer.rank
        mine = [
            any(rank in part for part in over.carriers(segment, self._placement))
            for segment in range(over.num_roles(self._placement))
        ]
        return [segment for segment in range(num_segments) if mine[segment % len(mine)]]

    def _gradient_buffers(
        self, scopes: Sequence[_ScopedExchange], spans: Sequence[ParameterSpan]
    ) -> tuple[Tensor, Tensor]:
        """Return the buffers that gradients are sent from and received in; one buffer where that is best."""
        layout = gradient_layout(spans)
        outgoing = allocate(self._host, layout.wire_numel, layout.dtype, spans[0].device)
        exchange, peer = scopes[0].exchange, scopes[0].peer
        if (
            len(scopes) == 1
            and peer
            and exchange.collective.in_place(exchange.choices, _works_in_place(peer, outgoing))
        ):
            return outgoing, outgoing
        return outgoing, allocate(self._host, layout.wire_numel, layout.dtype, spans[0].device)

    def _parameter_segments(
        self, exchange: Exchange, peer: Peer, cut: Mapping[int, list[ParameterSpan]], places: Sequence[Pieces]
    ) -> list[Segment]:
        """Return an exchange's segments, of parameters by the segment's number, which lie in `places`."""
        targets, apart = [pieces[0][1] for pieces in places], self._island.own is not None
        layouts = [
            parameter_layout(spans, exchange, not apart and _works_in_place(peer, target), in_pieces=apart)
            for spans, target in zip(cut.values(), targets, strict=True)
        ]
        sent, came = [each.own_outgoing for each in layouts], [each.own_incoming for each in layouts]
        sends, receives = (_buffers(exchange, peer, layouts, owns) for owns in (sent, came))
        segments = []
        for number, (index, spans) in enumerate(cut.items()):
            outgoing = sends.get(number, targets[number])
            incoming, name = receives.get(number, outgoing), _name(exchange, index)
            segments.append(
                Segment(name, index, spans, outgoing, incoming, on_lanes=self._device is not None)
            )
        return segments

    def _carrier(self, peer: Peer) -> Peer:
        """Return an endpoint among the ranks of `peer` by the lanes that carry exchanges; collective."""
        if self._device is None:
            return peer
        on_device = peer.on_device(str(self._device))
        if on_device is None:
            raise AttachError(
                f"transport {peer.transport} has no lanes for tensors on {self._device}: use lanes='host', which "
                "goes through host memory, or transport mpi or torch"
            )
        return on_device

    def _open(self, scope: _ScopedExchange, peer: Peer, segments: list[Segment]) -> ActiveExchange:
        exchange = scope.exchange
        carrier = self._carrier(peer)
        try:
            channel = exchange.collective.open(carrier, segments, self.progress, exchange.choices)
        except ValueError as error:
            raise CompositionError(f"{exchange.name}: {error}") from error
        if channel.notice and self._island.is_main:
            _log.warning("%s: %s", exchange.name, channel.notice)
        scale = 1.0
        if exchange.slot == GRADIENTS:
            scale = _scale(scope)
        elif not channel.averages:
            scale = exchange.collective.traits.contribution_scale(peer.size)
        part = exchange.over.part_of(self._peer.rank, self._placement)
        assert part is not None
        opened = ActiveExchange(
            exchange,
            self._island.in_session(part),
            peer,
            segments,
            channel,
            self.progress,
            self._counters,
            scale,
            self._observer,
            ordered=carrier.ordered,
        )
        self.opened.append(opened)
        return opened


def _scale(scope: _ScopedExchange) -> float:
    """Return the factor of gradients in an exchange.

    Groups weigh by their ranks, so that a mean of groups' means is the mean over ranks: the weights that travel along
    make up for what a group of another size scales too much or too little.
    """
    return scope.exchange.collective.traits.contribution_scale(mean(map(len, scope.parts)))


def _buffers(
    exchange: Exchange, peer: Peer, layouts: Sequence[Layout], owns: Sequence[bool]
) -> dict[int, Tensor]:
    """Return the buffers of the layouts that have one, by their number; those that take turns share two."""
    buffers: dict[int, Tensor] = {}
    for numbers, longest in buffers_of(exchange, layouts, owns):
        span = layouts[numbers[0]].spans[0]
        buffer = allocate(peer, longest, wire_dtype(span.dtype), span.device)
        buffers |= {number: buffer[: layouts[number].wire_numel] for number in numbers}
    return buffers


def _works_in_place(peer: Peer, buffer: Tensor) -> bool:
    # What travels in another dtype has buffers of its own.
    travels = buffer.device.type == "cpu" and buffer.dtype == wire_dtype(buffer.dtype)
    return travels and peer.memory.works_in_place(buffer.detach().numpy())


def _name(exchange: Exchange, index: int) -> str:
    return f"{exchange.name}[{index}]"
