"""The interface of collectives: how the contributions of several ranks are combined, and the channel that does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from hocket.compressor.api import footprint_of
from hocket.configured import Configured
from hocket.transport.lane import Lane
from hocket.transport.network import Cost
from hocket.transport.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.collective.packing import Packing
    from hocket.compressor.api import Compressor, SegmentShape
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
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
    """What became of one exchange of one segment.

    Attributes:
        round: the exchange's counter, as given to `Channel.start`; a later one where the rank was late for a partial
            collective.
        included: whether what this rank contributed is in the result.
        num_active: how many ranks' contributions are in the result; in a partial collective those that came in time.
        nonfinite: the ranks of the scope whose contributions held NaN or Inf, where `Channel.finds_nonfinite`.
        staleness: how many rounds late one of this rank's contributions has come in, at most, so far; by averagings of
            pairs, how many have come in at once.
        partners: the ranks of the scope that this one has averaged with since the outcome before, in order, where its
            collective averages pairs.
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
        carried_by: of a channel that chooses among collectives, by a segment's index the one that counts its bytes.
        notice: a sentence on what its user may not expect of these segments, logged when it is open; empty for none.

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
        """Return whether outcomes tell whose contributions held NaN or Inf, so that nobody has to look before."""
        return False

    @abstractmethod
    def start(self, segments: Sequence[Segment], round: int) -> Request:
        """Begin the exchange of each segment's `outgoing` into its `incoming`; never blocks.

        Args:
            segments: one of those that the channel was opened with, or a group of `groups`. Nobody changes their
                `outgoing` or reads their `incoming` until the request is done.
            round: the exchange's own counter, from 0.

        Returns:
            A request whose result is an Outcome.
        """

    def take_stale(self, segment: Segment) -> Tensor | None:
        """Give up what no round has sent of this rank's contributions, as residuals.

        Returns:
            [segment.numel] on the CPU, zeros where nothing is left; None, on all ranks alike, if nothing is ever kept.
        """
        return None if self.packing is None else self.packing.take_residual(segment)

    def take_changes(self, segment: Segment) -> Tensor | None:
        """Give up what others have changed of this rank's values since its last outcome; collective.

        Called where nothing is under way, before all ranks do something together: nobody is changed again until it
        starts a round.

        Returns:
            [segment.numel] on the CPU, to be added; None, on all ranks alike, if others change nothing between rounds.
        """
        return None

    def take_partners(self, segment: Segment) -> tuple[int, ...]:
        """Give up with which ranks of the scope this one has averaged since its last outcome, in order."""
        return ()

    def close(self) -> None:
        """Give back what the channel holds; collective, answering the others until all have closed."""
        for lane in self._lanes.values():
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, tensors and plain values by name; collective, with no request under way."""
        return {} if self.packing is None else self.packing.state_dict()

    def resume(self, rounds: Mapping[int, int], state: dict[str, Any] | None) -> None:
        """Let each segment's first round count as another, on all ranks alike.

        Args:
            rounds: what `start` is called with next, by the segments' indices.
            state: what `state_dict` returned on this rank; None where this rank has nothing of its own to go on from.
        """
        if state is not None and self.packing is not None:
            self.packing.load_state_dict(state)


class Ends(Enum):
    """What the ranks end a round with."""

    #: All with one combination, the same bits.
    SAME = auto()
    #: Each with a combination of its own.
    OWN = auto()
    #: The root with a combination, the others with what they had.
    ROOT = auto()
    #: All with the root's value.
    COPY = auto()


class Messages(Enum):
    """What a collective does with the messages that compressors make."""

    #: It takes none: values travel whole.
    NONE = auto()
    #: It adds them on their way, so that they must be reducible.
    SUMMED = auto()
    #: Each arrives, and is added on its own.
    GATHERED = auto()


@dataclass(frozen=True)
class CollectiveTraits:
    """What rules, sessions and plans know of a collective.

    Attributes:
        ends: what the ranks end a round with.
        slots: where it is meaningful: of "gradients" and "parameters".
        messages: what it does with compressors' messages.
        sums: whether it sums up, so that each rank scales its contribution by 1 / size for a mean. If not, it weighs
            contributions itself.
        root: the root's rank where `ends` speaks of one; None for the rank that leads the segment.
        needs_topology: whether it asks a topology who hears from whom; if not, it refuses one.
        pushes_weight: whether values are meant to be divided by a weight that travels with them (push-sum).
        needs_thread: whether others need this rank's answer while its training thread computes.
        threadable: whether a progress thread can advance its requests beside the training thread (`progress: thread`).
        depends_on_time: whether results depend on when ranks come to a round, or on what was measured, so that no two
            runs need have the same.
        divides_by_weight: whether gradients are divided by the weight that comes with them. Not where contributions
            may come in a later round: there the divisor must be the same in all rounds, or they would count more or
            less than others.
        catches_up: whether a rank that was late is handed the sum of all rounds that it has missed, so that ranks that
            have done the same rounds have been given the same.
        passive: whether others change a rank's values also between its rounds, with whomever of the topology's graph
            and by weights of their own: results are changes to be added, and what no round has brought is taken by
            `Channel.take_changes`.
        on_devices: whether its channels take buffers as they lie on a device, by lanes that are there, too.
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
    depends_on_time: bool = False
    divides_by_weight: bool = True
    catches_up: bool = False
    passive: bool = False
    on_devices: bool = False

    @property
    def equal_result(self) -> bool:
        """Whether every rank of the scope ends each round with the same value."""
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
    """An exchange's other choices, as far as a collective has to know them.

    Attributes:
        name: the exchange's, for messages to a reader.
        slot: "gradients" or "parameters".
        topology: who hears from whom; None for collectives that need none.
        compressor: in what form values travel; None for whole.
        leader: from a number of ranks and a segment's index to the rank that leads the segment among so many.
        keeps_own: whether what messages leave out of a rank's values stays there, as of parameters, which are not used
            up as gradients are.
    """

    name: str
    slot: str
    topology: Topology | None = None
    compressor: Compressor | None = None
    leader: Callable[[int, int], int] = _first
    keeps_own: bool = False


class Collective(Configured, ABC):
    """How contributions are combined; a frozen dataclass whose fields are its configuration."""

    @property
    @abstractmethod
    def traits(self) -> CollectiveTraits:
        """What others know of it."""

    @abstractmethod
    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        """Make ready for rounds: open lanes, allocate, pre-post; collective among the peer's ranks.

        Args:
            peer: this rank's endpoint in the exchange's scope.
            segments: what will be exchanged, in the same order on every rank of the peer; of the exchange's
                segments all or some, as their `index` says.
            progress: runs what must go on while nobody waits.
            choices: the exchange's others.
        """

    @abstractmethod
    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return what one segment costs a rank in one round, on average over ranks, on an otherwise idle network.

        Args:
            message_bytes: one rank's contribution, compressed if it is; see `message_bytes`.
            size: ranks that take part.
            topology: the exchange's.
            network: what seconds are predicted for.

        Returns:
            Bytes that are sent, seconds, and bytes of memory that the channel takes besides the segment's own.
        """

    def message_bytes(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return what `plan` is to ask `cost` with, for one segment in bytes.

        That is what the compressor says, but for a collective that chooses by size or network what it compresses.

        Args:
            compressor: the exchange's; None for whole.
            shape: the segment's.
            size: ranks that take part.
            network: what seconds are predicted for.
        """
        return footprint_of(compressor, shape).message_bytes

    def in_place(self, choices: Choices, shared: bool) -> bool:
        """Return whether `incoming` may, and had better, be `outgoing`: a buffer less, and no copy afterwards.

        Args:
            choices: the exchange's others.
            shared: whether the ranks' segments lie in memory that all of them share (`Memory.works_in_place`).
        """
        return False

    def check_size(self, size: int) -> None:
        """Refuse a number of ranks for which the collective is not defined.

        Args:
            size: ranks in the exchange's scope, 1 or more.

        Raises:
            ValueError: `size` is not possible; says what is.
        """

    def check_compressor(self, compressor: Compressor | None) -> None:
        """Refuse a compressor with which the collective is meaningless, beyond what its traits say.

        Raises:
            ValueError: says why, and what to use instead.
        """

    def notes(
        self,
        compressor: Compressor | None,
        shapes: Sequence[SegmentShape],
        size: int,
        network: NetworkModel,
    ) -> list[str]:
        """Return sentences for `plan`, on what it would not show of this collective.

        Args:
            compressor: the exchange's; None for whole.
            shapes: the exchange's segments.
            size: ranks that take part.
            network: what seconds are predicted for.
        """
        return []
