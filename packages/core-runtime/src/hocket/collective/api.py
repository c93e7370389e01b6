"""The interface of collectives: how the contributions of several ranks are combined, and the channel that does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from hocket.compressor.api import footprint_of
from hocket.configured import Configured
from hocket.plain import Tree
from hocket.transport.lane import Lane
from hocket.transport.network import Cost
from hocket.transport.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.collective.packing import Packing
    from hocket.compressor.api import Compressor
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = [
    "Channel",
    "Choices",
    "Collective",
    "CollectiveTraits",
    "Cost",
    "Ends",
    "Messages",
    "Outcome",
]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one exchange of one segment.

    Attributes:
        round: the exchange's counter, as given to `Channel.start`; a later one where the rank was late for a partial
            collective.
        included: whether this rank's contribution is in the result.
        num_active: number of ranks whose contributions are in the result; in a partial collective those in time.
        nonfinite: the ranks of the scope whose contributions held NaN or Inf, where `Channel.finds_nonfinite`.
        staleness: the most rounds by which one of this rank's contributions was late so far; where a collective
            averages pairs, the most averagings that arrived at once.
        partners: where a collective averages pairs, the ranks of the scope that this one has averaged with since its
            previous outcome, in order.
    """

    round: int
    included: bool
    num_active: int
    nonfinite: tuple[int, ...] = ()
    staleness: int = 0
    partners: tuple[int, ...] = ()


class Channel(ABC):
    """An open collective: one exchange's segments on one rank, with the state between rounds.

    Opening and closing are collective. Segments may be started in any order, which may differ between ranks;
    the rounds of one segment are started in order.

    Attributes:
        packing: the exchange's compressor with what it remembers; None where segments travel as they are.
        groups: the segments, each once, in groups that cost less when they are started together; the same on all ranks.
        averages: whether a combination is the mean already, where its collective sums up.
        carried_by: where a channel chooses among collectives, the one that counts a segment's bytes, by its index.
        notice: a sentence about something unexpected in these segments, logged when the channel is open; else empty.

    Args:
        segments: all of the channel.
        lanes: by the segments' indices, what `close` closes.
        packing: the attribute.
    """

    def __init__(
        self, segments: Sequence[Segment], lanes: Mapping[int, Lane], packing: Packing | None = None
    ) -> None:
        self.packing = packing
        self.groups: Sequence[Sequence[Segment]] = [[segment] for segment in segments]
        self.averages = False
        self.carried_by: Mapping[int, Collective] = {}
        self.notice = ""
        self._lanes = lanes

    def finds_nonfinite(self, segment: Segment) -> bool:
        """Return whether outcomes name the ranks that contributed NaN or Inf, so that no caller has to look before."""
        return False

    @abstractmethod
    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        """Begin the exchange of each segment's `outgoing` into its `incoming`; never blocks.

        Args:
            segments: one of those that the channel was opened with, or a group of `groups`. Nobody changes their
                `outgoing` or reads their `incoming` until the request is done.
            round: the exchange's own counter, from 0.

        Returns:
            A request whose result is an Outcome.
        """

    def take_stale(self, segment: Segment) -> Tensor | None:
        """Remove and return the part of this rank's contributions that no round has sent, as residuals.

        Returns:
            [segment.numel] on the CPU, zeros where nothing is left; None, on all ranks alike, if nothing is ever kept.
        """
        return None if self.packing is None else self.packing.take_residual(segment)

    def take_changes(self, segment: Segment) -> Tensor | None:
        """Remove and return the changes that others made to this rank's values since its last outcome; collective.

        Called where nothing is under way, before all ranks do something together. A rank's values change again only
        after it has started a round.

        Returns:
            [segment.numel] on the CPU, to be added; None, on all ranks alike, if others change nothing between rounds.
        """
        return None

    def take_partners(self, segment: Segment) -> tuple[int, ...]:
        """Remove and return the ranks of the scope that this one has averaged with since its last outcome, in order."""
        return ()

    def close(self) -> None:
        """Release what the channel holds, and answer the other ranks until all have closed; collective."""
        for lane in self._lanes.values():
            lane.close()

    def state_dict(self) -> Tree:
        """Return tensors and plain values by name for a resumed run; collective, with no request under way."""
        return {} if self.packing is None else self.packing.state_dict()

    def resume(self, rounds: Mapping[int, int], state: Tree | None) -> None:
        """Number each segment's first round as given, on all ranks alike.

        Args:
            rounds: what `start` is called with next, by the segments' indices.
            state: the result of `state_dict` on this rank; None where it has no state of its own to continue from.
        """
        if state is not None and self.packing is not None:
            self.packing.load_state_dict(state)


class Ends(Enum):
    """The values that ranks end a round with."""

    #: All with one combination, the same bits.
    SAME = auto()
    #: Each with a combination of its own.
    OWN = auto()
    #: Each with a value that others change between its rounds, too, by partners and weights that they choose. A result
    #: is then a change to be added; `Channel.take_changes` returns those that no round has delivered.
    OPEN = auto()
    #: The root with a combination, the others with what they had.
    ROOT = auto()
    #: All with the root's value.
    COPY = auto()


class Messages(Enum):
    """The treatment of compressors' messages by a collective."""

    #: It takes none: values travel whole.
    NONE = auto()
    #: It adds them on their way, so that they must be reducible.
    SUMMED = auto()
    #: Each arrives, and is added on its own.
    GATHERED = auto()


@dataclass(frozen=True)
class CollectiveTraits:
    """The properties of a collective that rules, sessions and plans read.

    Attributes:
        ends: the values that ranks end a round with.
        slots: the slots where it is meaningful: of "gradients" and "parameters".
        messages: its treatment of compressors' messages.
        sums: whether it sums up, so that each rank scales its contribution by 1 / size for a mean. If not, it weighs
            contributions itself.
        root: the root's rank where `ends` speaks of one; None for the rank that leads the segment.
        needs_topology: whether it needs a topology, the graph of who sends to whom; if not, it refuses one.
        pushes_weight: whether values are meant to be divided by a weight that travels with them (push-sum).
        needs_thread: whether others need this rank's answer while its training thread computes.
        threadable: whether a progress thread can advance its requests beside the training thread (`progress: thread`).
            It can where they are made of `isend`, `irecv` and `iexchange` alone, and the functions given to `then` use
            nothing that the training thread uses meanwhile. A lane's sums, gathers, broadcasts and barriers are no
            such requests, nor is what a schedule carries out: other waits advance them, too.
        divides_by_weight: whether gradients are divided by the weight that comes with them. Not where contributions
            may come in a later round: there the divisor must be the same in all rounds, or they would count more or
            less than others.
        catches_up: whether a late rank receives the sum of all rounds that it has missed, so that ranks that have done
            the same rounds have received the same.
        on_devices: whether its channels also exchange buffers in device memory, over device lanes.
    """

    ends: Ends
    slots: frozenset[str] = frozenset({"gradients", "parameters"})
    messages: Messages = Messages.NONE
    sums: bool = False
    root: int | None = None
    needs_topology: bool = False
    pushes_weight: bool = False
    needs_thread: bool = False
    threadable: bool = False
    divides_by_weight: bool = True
    catches_up: bool = False
    on_devices: bool = False

    @property
    def equal_result(self) -> bool:
        """Tell whether every rank of the scope ends each round with the same value."""
        return self.ends in {Ends.SAME, Ends.COPY}

    def contribution_scale(self, size: float) -> float:
        """Return the factor by which each rank scales its contribution so that the combination is a mean.

        Args:
            size: ranks that take part; their mean where groups of different sizes are to weigh by their ranks.
        """
        return 1 / size if self.sums else 1.0


def _first(size: int, segment: int) -> int:
    return 0


@dataclass(frozen=True)
class Choices:
    """The other choices of an exchange that a collective has to know.

    Attributes:
        name: the exchange's, for messages to a reader.
        slot: "gradients" or "parameters".
        topology: the graph of who sends to whom; None for collectives that need none.
        compressor: the form in which values travel; None for uncompressed.
        leader: function from a number of ranks and a segment's index to the rank that leads the segment.
        keeps_own: whether values that messages leave out stay with the rank, as parameters do. Gradients are used up:
            what a message leaves out of them is lost or goes to a residual.
    """

    name: str
    slot: str
    topology: Topology | None = None
    compressor: Compressor | None = None
    leader: Callable[[int, int], int] = _first
    keeps_own: bool = False


class Collective(Configured, ABC):
    """A way to combine the ranks' contributions; a frozen dataclass whose fields are its configuration."""

    @property
    @abstractmethod
    def traits(self) -> CollectiveTraits:
        """Return the properties that rules, sessions and plans read."""

    @abstractmethod
    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        """Prepare for rounds: open lanes, allocate, pre-post; collective among the peer's ranks.

        Args:
            peer: this rank's endpoint in the exchange's scope.
            segments: the segments to exchange, in the same order on every rank of the peer. These may be some of the
                exchange's segments only; see their `index`.
            progress: the engine that advances operations while no rank waits for them.
            choices: the exchange's other choices.
        """

    @abstractmethod
    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return the cost of one segment in one round, averaged over ranks, on an otherwise idle network.

        Args:
            message_bytes: bytes of one rank's contribution, as compressed; see the method `message_bytes`.
            size: number of ranks that take part.
            topology: the exchange's.
            network: the network that seconds are predicted for.

        Returns:
            Bytes sent, seconds, and bytes of memory that the channel takes besides the segment's own.
        """

    def message_bytes(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return the bytes of one segment that `plan` passes to `cost`.

        These are the compressor's, unless a collective chooses what it compresses by size or network.

        Args:
            compressor: the exchange's; None for whole.
            shape: the segment's.
            size: ranks that take part.
            network: what seconds are predicted for.
        """
        return footprint_of(compressor, shape).message_bytes

    def in_place(self, choices: Choices, shared: bool) -> bool:
        """Return whether `incoming` should be `outgoing` itself, which saves a buffer and a copy.

        A channel may then write `incoming` only after it has read this round's `outgoing`, and all that was sent from
        there has left, as in the function that it gives to `then`. Sessions may have two buffers even so.

        Args:
            choices: the exchange's others.
            shared: whether the ranks' segments lie in memory that all of them share (`Memory.works_in_place`).
        """
        return False

    def reads_shared(self, compressor: Compressor | None) -> bool:
        """Return whether ranks that share memory read each other's segments there, and need no buffers for them."""
        return False

    def check_size(self, size: int) -> None:
        """Refuse a number of ranks that the collective is not defined for.

        Args:
            size: ranks in the exchange's scope, 1 or more.

        Raises:
            ValueError: `size` is not possible; the message names the possible ones.
        """

    def check_compressor(self, compressor: Compressor | None) -> None:
        """Refuse a compressor that makes no sense with this collective, beyond the rules about its traits.

        Raises:
            ValueError: the compressor makes no sense here; the message says why, and what to use instead.
        """

    def notes(
        self,
        compressor: Compressor | None,
        shapes: Sequence[SegmentShape],
        size: int,
        network: NetworkModel,
    ) -> list[str]:
        """Return sentences about this collective that `plan` shows below its figures.

        Args:
            compressor: the exchange's; None for whole.
            shapes: the exchange's segments.
            size: ranks that take part.
            network: what seconds are predicted for.
        """
        return []
