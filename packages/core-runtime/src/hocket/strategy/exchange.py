"""An exchange: independent choices about what one slot sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hocket.collective.api import Choices, Collective
from hocket.compressor.api import Compressor
from hocket.configured import Configured
from hocket.outer.api import Merge, Outer
from hocket.outer.merge import AddDisplacement
from hocket.segment.partition import Bytes, Segmentation
from hocket.strategy.scope import Scope, World
from hocket.topology.api import Topology

__all__ = ["GRADIENTS", "PARAMETERS", "Buffers", "Every", "Exchange", "Overlap", "ProgressMode"]

#: The slots that hold exchanges.
GRADIENTS = "gradients"
PARAMETERS = "parameters"


class Overlap(StrEnum):
    """Computation that an exchange overlaps with."""

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"


class Every(StrEnum):
    """Numbers of steps that depend on the number of ranks."""

    LOG2_RANKS = "log2_ranks"


class ProgressMode(StrEnum):
    """Which thread advances an exchange that is under way."""

    INLINE = "inline"
    THREAD = "thread"


class Buffers(StrEnum):
    """What becomes of a model's buffers where its parameters are exchanged."""

    OWN = "own"
    MEAN = "mean"


@dataclass(frozen=True)
class Exchange(Configured):
    """What crosses the wire once at one moment of a training step.

    Attributes:
        collective: how the contributions are combined.
        over: among whom.
        topology: who hears from whom, for the collectives that ask.
        compressor: in what form values travel; None, in a config `none`, for whole.
        segments: in what pieces.
        every: it takes place every N steps, 1 or more; `log2_ranks` for ceil(log2 p) among p ranks, so that what an
            allreduce's ceil(log2 p) messages cost is shared out over as many steps.
        overlap: the computation that it overlaps with.
        progress: who advances its messages while the training thread computes: that thread itself, whenever a gradient
            arrives and whenever it waits, or a progress thread.
        outer: how the outer parameters step that the ranks keep; None where none are kept, and parameters themselves
            are sent. With one, each rank sends its distance from them.
        delay: how many steps after it was sent what has come is merged; at 0 in the same step.
        merge: what becomes of parameters then.
        stagger: whether segments are due at different steps of the period, evenly spread, the last at its end.
        offset: by how many steps all of them are due later, or earlier where it is negative.
        buffers: whether the model's buffers (BatchNorm's statistics) stay each rank's own, or are set to their mean at
            the end of each period, when the last segment is sent.
        offload: whether outer parameters, and what their optimizer remembers, lie in host memory, pinned for CUDA,
            and not where the model is: a step of theirs takes copies there and back.
        slot: `gradients` or `parameters`; a Strategy sets it.
        index: place in the slot, from 0; the exchanges of a slot follow each other; a Strategy sets it.
    """

    collective: Collective
    over: Scope = field(default_factory=World)
    topology: Topology | None = None
    compressor: Compressor | None = None
    segments: Segmentation = field(default_factory=Bytes)
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
        """Return every how many steps it takes place among `size` ranks."""
        if isinstance(self.every, Every):
            return max(1, (size - 1).bit_length())  # ceil(log2 size), exactly
        return self.every

    @property
    def schedule(self) -> tuple[int | Every, bool, int]:
        """What decides in which steps it takes place, for the same segments."""
        return self.every, self.stagger, self.offset

    def is_due(self, step: int, segment: int, num_segments: int, size: int) -> bool:
        """Return whether segment number `segment` of `num_segments` is sent after step number `step`, from 1 on."""
        period = self.period(size)
        start = round((segment + 1) * period / num_segments) if self.stagger else 0
        return (step - start - self.offset) % period == 0

    def averages_buffers_after(self, step: int, size: int) -> bool:
        """Return whether buffers are averaged after step number `step`, from 1 on: when a period ends."""
        return self.buffers is Buffers.MEAN and (step - self.offset) % self.period(size) == 0

    @property
    def keeps_own(self) -> bool:
        """Whether what is not sent of a rank's values stays there: of parameters, not of distances from outer ones."""
        return self.slot == PARAMETERS and self.outer is None

    @property
    def keeps_sent(self) -> bool:
        """Whether what parameters were when their distance was sent is kept until they are merged."""
        return self.outer is not None and self.delay > 0 and self.merge.needs_sent

    def takes_place(self, num_ranks: int) -> bool:
        """Return whether so many ranks have something to do: one alone steps outer parameters, too."""
        return num_ranks >= 2 or (num_ranks == 1 and self.outer is not None)

    def check_size(self, size: int) -> None:
        """Refuse numbers of ranks for which one of its parts is not defined.

        Raises:
            ValueError: says what is.
        """
        self.collective.check_size(size)
        if self.topology is not None:
            self.topology.check_size(size)
        period = self.period(size)
        if self.delay > period:
            raise ValueError(
                f"delay: {self.delay} steps are longer than its period, {period}: use {period} or less"
            )

    def check_segments(self, num_segments: int, size: int) -> None:
        """Refuse more segments than the period has steps, if each is to have one of its own.

        Raises:
            ValueError: says how many there are.
        """
        if self.stagger and num_segments > self.period(size):
            raise ValueError(
                f"stagger: {num_segments} segments need as many steps of their own, and every is {self.period(size)}: "
                "use a longer period, or fewer segments ({name: fragments, count: 2})"
            )

    @property
    def name(self) -> str:
        """The exchange's place as configs and messages write it, for instance `gradients.0`."""
        return f"{self.slot}.{self.index}"

    @property
    def carries_weight(self) -> bool:
        """Whether a push-sum weight travels with each segment, as weights can become other than 1."""
        topology = self.topology
        pushes = self.collective.traits.pushes_weight
        return pushes and topology is not None and not topology.rows_sum_to_one

    @property
    def choices(self) -> Choices:
        """What its collective has to know of it."""
        return Choices(
            self.name, self.slot, self.topology, self.compressor, self.over.leader, keeps_own=self.keeps_own
        )
