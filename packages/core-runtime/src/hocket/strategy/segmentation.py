"""In what pieces a model is exchanged, as configuration; `hocket.segment.partition` does the cutting."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass

from hocket.config.configured import Configured

__all__ = ["Bytes", "Layers", "Model", "Segmentation"]


class Segmentation(Configured, ABC):
    """In what pieces a model is exchanged; a frozen dataclass whose fields are its configuration."""


@dataclass(frozen=True)
class Model(Segmentation):
    """The whole model in one segment for each dtype and device."""


@dataclass(frozen=True)
class Layers(Segmentation):
    """A segment for each module that owns parameters."""


@dataclass(frozen=True)
class Bytes(Segmentation):
    """Segments of about so many bytes; a parameter is never cut.

    Attributes:
        size_mb: a segment's size in MiB (2**20 bytes), more than 0; a larger parameter has a segment of its
            own.
    """

    size_mb: float = 25.0

    def __post_init__(self) -> None:
        if not 0 < self.size_mb < math.inf:
            raise ValueError(f"size_mb must be finite and more than 0, not {self.size_mb}")
