"""An exchange: five independent choices about what one slot sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hocket.collective.api import Collective
from hocket.compressor.api import Compressor
from hocket.compressor.none import NoCompression
from hocket.strategy.scope import Scope, World
from hocket.strategy.segmentation import Bytes, Segmentation
from hocket.topology.api import Topology

__all__ = ["GRADIENTS", "PARAMETERS", "Exchange", "Overlap"]

#: The slots that hold exchanges.
GRADIENTS = "gradients"
PARAMETERS = "parameters"


class Overlap(StrEnum):
    """What an exchange is hidden behind."""

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"
    DELAYED = "delayed"


@dataclass(frozen=True)
class Exchange:
    """What crosses the wire once at one moment of a training step.

    Attributes:
        slot: `gradients` or `parameters`.
        index: place in the slot, from 0; the exchanges of a slot follow each other.
        collective: how the contributions are combined.
        over: among whom.
        topology: who hears from whom, for the collectives that ask.
        compressor: in what form values travel.
        segments: in what pieces.
        every: in each how manieth step, 1 or more.
        overlap: what hides it.
    """

    slot: str
    index: int
    collective: Collective
    over: Scope = field(default_factory=World)
    topology: Topology | None = None
    compressor: Compressor = field(default_factory=NoCompression)
    segments: Segmentation = field(default_factory=Bytes)
    every: int = 1
    overlap: Overlap = Overlap.NONE

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be 1 or more, not {self.every}")

    @property
    def name(self) -> str:
        """The exchange's place as configs and messages write it, for instance `gradients.0`."""
        return f"{self.slot}.{self.index}"

    @property
    def equalises_world(self) -> bool:
        """Whether each round leaves every rank of the world with the same value."""
        return isinstance(self.over, World) and self.collective.equal_result
