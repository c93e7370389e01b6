"""An exchange: independent choices about what one slot sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hocket.collective.api import Choices, Collective
from hocket.compressor.api import Compressor
from hocket.configured import Configured
from hocket.errors import CompositionError
from hocket.outer.api import Merge, Outer
from hocket.outer.merge import AddDisplacement
from hocket.segment.partition import Bytes, Segmentation
from hocket.strategy.scope import Scope, World
from hocket.topology.api import Topology

#: The slots that hold exchanges.
GRADIENTS = "gradients"
PARAMETERS = "parameters"


class Overlap(StrEnum):
    """The computation that an exchange overlaps with."""

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"


class Every(StrEnum):
    """A number of steps that depends on the number of ranks."""

    LOG2_RANKS = "log2_ranks"


class ProgressMode(StrEnum):
    """The thread that advances an exchange under way."""

    INLINE = "inline"
    THREAD = "thread"


class Buffers(StrEnum):
    """The treatment of a model's buffers where its parameters are exchanged."""

    OWN = "own"
    MEAN = "mean"


@dataclass(frozen=True)
class Exchange(Configured):
    """An exchange between ranks at one moment of a training step.

    Attributes:
        collective: the way to combine the contributions.
        over: the ranks that take part.
        topology: the graph of who sends to whom, for collectives that need one.
        compressor: the form in which values travel; for uncompressed values None, in a config `none`.
        segments: the way to cut the model into segments. Without this key segments have 8 MB, the first one 1 MB;
            `segments: bytes` makes segments of 25 MB.
        every: steps between two exchanges, 1 or more; `log2_ranks` for ceil(log2 p) among p ranks, the number of
            messages of an allreduce.
        overlap: the computation that the exchange overlaps with.
        progress: the thread that advances the exchange's messages: `inline` is the training thread, whenever a gradient
            arrives and whenever it waits; `thread` is a separate progress thread.
        outer: the optimizer of outer parameters: each rank sends the distance of its parameters from the outer ones.
            None to send the parameters themselves.
        delay: number of steps from sending to merging; at 0 both happen in the same step.
        merge: the way to merge the result into the parameters.
        stagger: whether segments are due at different steps, evenly spread over the period of `every` steps, the last
            one at its end.
        offset: number of steps by which all segments are due later, or earlier if negative.
        buffers: whether each rank keeps its own buffers (BatchNorm's statistics), or they are averaged at the end of
            each period, when the last segment is sent.
        offload: whether outer parameters and their optimizer's state stay in host memory (pinned for CUDA), not on
            the model's device; each outer step then copies there and back.
        slot: `gradients` or `parameters`; a Strategy sets it.
        index: place in the slot, from 0; the exchanges of a slot follow each other; a Strategy sets it.
    """

    collective: Collective
    over: Scope = field(default_factory=World)
    topology: Topology | None = None
    compressor: Compressor | None = None
    segments: Segmentation = field(default_factory=lambda: Bytes(size_mb=8.0, first_mb=1.0))
    every: int | Every = 1
    overlap: Overlap = Overlap.NONE
    progress: ProgressMode = ProgressMode.INLINE
    outer: Outer | None = None
    delay: int = 0
    merge: Merge = field(default_factory=AddDisplacement)
    stagger: bool = False
    offset: int = 0
    buffers: Buffers = Buffers.OWN
    offload: bool = False
    slot: str = field(default="", kw_only=True)
    index: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.every, Every) and self.every < 1:
            raise ValueError(f"every must be 1 or more, not {self.every}")
        if self.delay < 0:
            raise ValueError(f"delay must be 0 or more, not {self.delay}")

    def period(self, size: int) -> int:
        """Return the number of steps from one exchange to the next among `size` ranks."""
        if isinstance(self.every, Every):
            return max(1, (size - 1).bit_length())  # ceil(log2 size), exactly
        return self.every

    @property
    def schedule(self) -> tuple[int | Every, bool, int]:
        """Return the choices that decide its steps, for the same segments."""
        return self.every, self.stagger, self.offset

    def since_due(self, step: int, size: int) -> int:
        """Return the number of steps from the end of a period to step number `step`, from 1 on."""
        return (step - self.offset) % self.period(size)

    def is_due(self, step: int, segment: int, num_segments: int, size: int) -> bool:
        """Return whether segment number `segment` of `num_segments` is sent after step number `step`, from 1 on."""
        period = self.period(size)
        start = round((segment + 1) * period / num_segments) if self.stagger else 0
        return self.since_due(step - start, size) == 0

    def averages_buffers_after(self, step: int, size: int) -> bool:
        """Return whether buffers are averaged after step number `step`, from 1 on: when a period ends."""
        return self.buffers is Buffers.MEAN and self.since_due(step, size) == 0

    @property
    def keeps_own(self) -> bool:
        """Tell whether unsent values stay with the rank: parameters do, distances from outer ones do not."""
        return self.slot == PARAMETERS and self.outer is None

    @property
    def keeps_sent(self) -> bool:
        """Tell whether parameters from when their distance was sent are kept until they are merged."""
        return self.outer is not None and self.delay > 0 and self.merge.needs_sent

    @property
    def takes_turns(self) -> bool:
        """Tell whether segments share buffers: each is sent and merged within a step's end, one after the other."""
        return self.outer is not None and self.overlap is Overlap.NONE and not self.delay

    def takes_place(self, num_ranks: int) -> bool:
        """Return whether `num_ranks` ranks have something to do: one alone only steps outer parameters."""
        return num_ranks >= 2 or (num_ranks == 1 and self.outer is not None)

    def check_size(self, size: int) -> None:
        """Refuse numbers of ranks that one of its parts is not defined for.

        Raises:
            ValueError: a part is not defined for it; says which numbers are possible.
        """
        self.collective.check_size(size)
        if self.topology is not None:
            self.topology.check_size(size)
        period = self.period(size)
        if self.delay > period:
            raise ValueError(
                f"delay {self.delay} is longer than this exchange's period among {size} ranks, {period} "
                f"step{'s' * (period != 1)}: use {period} or less"
            )

    def check_segments(self, num_segments: int, size: int) -> None:
        """Refuse more segments than the period has steps, if each needs a step of its own.

        Raises:
            CompositionError: there are too many segments; says how many.
        """
        if self.stagger and num_segments > self.period(size):
            raise CompositionError(
                f"{self.name}: stagger: {num_segments} segments need {num_segments} steps, but every is "
                f"{self.period(size)}: use a longer period, or fewer segments ({{name: fragments, count: 2}})"
            )

    @property
    def name(self) -> str:
        """Return the exchange's place in configs and messages, for instance `gradients.0`."""
        return f"{self.slot}.{self.index}"

    @property
    def carries_weight(self) -> bool:
        """Tell whether a push-sum weight travels with each segment, as weights can differ from 1."""
        topology = self.topology
        pushes = self.collective.traits.pushes_weight
        return pushes and topology is not None and not topology.rows_sum_to_one

    @property
    def choices(self) -> Choices:
        """Return the choices that its collective has to know."""
        return Choices(
            self.name, self.slot, self.topology, self.compressor, self.over.leader, keeps_own=self.keeps_own
        )
