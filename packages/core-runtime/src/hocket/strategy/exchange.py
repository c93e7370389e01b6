"""An exchange: five independent choices about what one slot sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hocket.collective.api import Choices, Collective
from hocket.compressor.api import Compressor
from hocket.configured import Configured
from hocket.segment.partition import Bytes, Segmentation
from hocket.strategy.scope import Scope, World
from hocket.topology.api import Topology

__all__ = ["GRADIENTS", "PARAMETERS", "Every", "Exchange", "Overlap", "Progress"]

#: The slots that hold exchanges.
GRADIENTS = "gradients"
PARAMETERS = "parameters"


class Overlap(StrEnum):
    """Computation that an exchange overlaps with."""

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"
    DELAYED = "delayed"


class Every(StrEnum):
    """Numbers of steps that depend on the number of ranks."""

    LOG2_RANKS = "log2_ranks"


class Progress(StrEnum):
    """Which thread advances an exchange that is under way."""

    INLINE = "inline"
    THREAD = "thread"


@dataclass(frozen=True)
class Exchange(Configured):
    """What crosses the wire once at one moment of a training step.

    Attributes:
        slot: `gradients` or `parameters`.
        index: place in the slot, from 0; the exchanges of a slot follow each other.
        collective: how the contributions are combined.
        over: among whom.
        topology: who hears from whom, for the collectives that ask.
        compressor: in what form values travel; None, in a config `none`, for whole.
        segments: in what pieces.
        every: in each how manieth step, 1 or more; `log2_ranks` for ceil(log2 p) among p ranks, so that what an
            allreduce's ceil(log2 p) messages cost is shared out over as many steps.
        overlap: what hides it.
        progress: who advances its messages while the training thread computes: that thread itself, whenever a gradient
            arrives and whenever it waits, or a progress thread.
    """

    slot: str
    index: int
    collective: Collective
    over: Scope = field(default_factory=World)
    topology: Topology | None = None
    compressor: Compressor | None = None
    segments: Segmentation = field(default_factory=Bytes)
    every: int | Every = 1
    overlap: Overlap = Overlap.NONE
    progress: Progress = Progress.INLINE

    def __post_init__(self) -> None:
        if not isinstance(self.every, Every) and self.every < 1:
            raise ValueError(f"every must be 1 or more, not {self.every}")

    def period(self, size: int) -> int:
        """Return in each how manieth step it takes place among `size` ranks."""
        if isinstance(self.every, Every):
            return max(1, (size - 1).bit_length())  # ceil(log2 size), exactly
        return self.every

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
        return Choices(self.name, self.slot, self.topology, self.compressor, self.over.leader)
