"""What a collective is: how the contributions of several ranks are combined, and the channel that does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.configured import Configured

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.collective.packing import Packing
    from hocket.compressor.api import Compressor, SegmentShape
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

__all__ = ["Channel", "Collective", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What became of one exchange of one segment.

    Attributes:
        round: the exchange's counter, as given to `Channel.start`; a later one where the rank was late for a partial
            collective.
        included: whether what this rank contributed is in the result.
        num_active: how many ranks' contributions are in the result; in a partial collective those that came in time.
        nonfinite: the ranks of the scope whose contributions held NaN or Inf, where `Channel.finds_nonfinite`.
        staleness: how many rounds late one of this rank's contributions has come in, at most, so far.
    """

    round: int
    included: bool
    num_active: int
    nonfinite: tuple[int, ...] = ()
    staleness: int = 0


class Channel(ABC):
    """An open collective: one exchange's segments on one rank, with the state between rounds.

    Opening and closing are collective. Segments may be started in any order, which may differ between ranks;
    the rounds of one segment are started in order.

    Attributes:
        packing: the exchange's compressor with what it remembers; None where segments travel as they are.
        notice: a sentence on what its user may not expect of these segments, logged when it is open; empty for none.
    """

    packing: Packing | None = None
    notice: str = ""

    def finds_nonfinite(self, segment: Segment) -> bool:
        """Return whether outcomes tell whose contributions held NaN or Inf, so that nobody has to look before."""
        return False

    @abstractmethod
    def start(self, segment: Segment, round: int) -> Request:
        """Begin the exchange of `segment.outgoing` into `segment.incoming`; never blocks.

        Args:
            segment: one of those that the channel was opened with; nobody changes its `outgoing` or reads its
                `incoming` until the request is done.
            round: the exchange's own counter, from 0.

        Returns:
            A request whose result is an Outcome.
        """

    def together(self, segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
        """Return which of `segments` are best exchanged as one where all are started at once, on all ranks alike.

        Returns:
            Each segment once; those that are alone in theirs are for `start`, several for `start_together`.
        """
        return [[segment] for segment in segments]

    def start_together(self, segments: Sequence[Segment], round: int) -> Request:
        """Begin the exchange of several segments that `together` has joined, as `start` does of one."""
        raise NotImplementedError(f"{type(self).__name__} joins no segments")

    @abstractmethod
    def flush(self) -> None:
        """Send what earlier rounds have kept back and wait for it; collective."""

    def take_stale(self, segment: Segment) -> Tensor | None:
        """Give up what no round has taken of this rank's contributions.

        Returns:
            [segment.numel] on the CPU, zeros where nothing is left; None, on all ranks alike, if nothing is ever late.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Give back what the channel holds; collective, answering the others until all have closed."""

    def count_on(self, round: int) -> None:  # noqa: B027 (nothing to do where nobody counts)
        """Let the first round count as `round`, of a run that is resumed without this channel's state; all ranks do."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, tensors and plain values by name; no request may be under way."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank."""


class Collective(Configured, ABC):
    """How contributions are combined; a frozen dataclass whose fields are its configuration."""

    #: The slots in which it means something: of "gradients" and "parameters".
    slots: ClassVar[frozenset[str]]

    #: Whether it asks a topology who hears from whom; if not, it refuses one.
    needs_topology: ClassVar[bool] = False

    #: Whether it can send what a compressor makes; if not, values travel whole.
    carries_messages: ClassVar[bool] = True

    #: Whether each rank's message arrives and is added on its own, so that compressors need not be reducible.
    gathers: ClassVar[bool] = False

    #: Whether others need this rank's answer while its training thread computes.
    needs_progress_thread: ClassVar[bool] = False

    #: Whether its requests can be advanced by a progress thread beside the training thread (`progress: thread`).
    threadable: ClassVar[bool] = False

    #: Whether gradients are divided by the weight that comes with them. Not where contributions may come in a later
    #: round: there the divisor must be the same in all rounds, or they would count more or less than others.
    divides_by_weight: ClassVar[bool] = True

    #: Whether every rank of the scope ends each round with the same value.
    equal_result: ClassVar[bool] = False

    @property
    def depends_on_time(self) -> bool:
        """Whether results depend on when ranks come to a round, or on what was measured, so that no two runs need
        have the same.
        """
        return False

    @property
    def pushes_weight(self) -> bool:
        """Whether values are meant to be divided by a weight that travels with them (push-sum)."""
        return False

    @abstractmethod
    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        """Make ready for rounds: open lanes, allocate, pre-post; collective among the peer's ranks.

        Args:
            peer: this rank's endpoint in the exchange's scope.
            segments: what will be exchanged, in the same order on every rank of the peer; of the exchange's
                segments all or some, as their `index` says.
            progress: runs what must go on while nobody waits.
            exchange: the exchange's other choices: its topology and its compressor.
        """

    @abstractmethod
    def contribution_scale(self, size: float) -> float:
        """Return the factor by which each rank scales its contribution so that the combination is a mean.

        1/size for a sum, 1 where the combination weighs the contributions itself.

        Args:
            size: ranks that take part; their mean where groups of different sizes are to weigh by their ranks.
        """

    def in_place(self, exchange: Exchange, shared: bool) -> bool:
        """Return whether `incoming` may, and had better, be `outgoing`: a buffer less, and no copy afterwards.

        Args:
            exchange: of this collective.
            shared: whether the ranks' segments lie in memory that all of them share (`Memory.works_in_place`).
        """
        return False

    def check_size(self, size: int) -> None:
        """Refuse a number of ranks for which the collective is not defined.

        Raises:
            ValueError: `size` is not possible; says what is.
        """

    def check_compressor(self, compressor: Compressor) -> None:
        """Refuse a compressor with which the collective means nothing, beyond what its flags say.

        Raises:
            ValueError: says why, and what to use instead.
        """

    def results(self, values: Sequence[Hashable], leader: int) -> list[Hashable]:
        """Return what each rank ends with, as tokens that are equal where the bits are.

        A token that is made of several is a tuple, which holds those whose ranks have a part in it.

        Args:
            values: a token for what each rank contributes.
            leader: the rank that leads the segment.
        """
        together = (self, tuple(values))
        if self.equal_result:
            return [together] * len(values)
        return [(rank, together) for rank in range(len(values))]

    @abstractmethod
    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return how many bytes a rank sends for one segment in one round, on average over ranks.

        Args:
            message_bytes: one rank's contribution, compressed if it is, in bytes.
            size: ranks that take part.
            topology: the exchange's.
        """

    def message_bytes(
        self, compressor: Compressor, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return what `plan` is to ask `bytes_per_round` and `seconds_per_round` with, for one segment in bytes.

        That is what the compressor says, but for a collective that chooses by size or network what it compresses.
        """
        return compressor.payload_bytes(shape)

    def notes(
        self, compressor: Compressor, shapes: Sequence[SegmentShape], size: int, network: NetworkModel
    ) -> list[str]:
        """Return sentences for `plan`, on what it would not show of this collective among `size` ranks."""
        return []

    def channel_bytes(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return the memory that a rank's channel takes for one segment besides the segment's own, in bytes."""
        return 0.0

    @abstractmethod
    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        """Return how long one segment takes in one round on an otherwise idle network, in seconds."""
