"""Model storage: the flat buffers that parameters and gradients are views of, cut into segments."""

from hocket.segment.partition import Span, partition
from hocket.segment.segment import Segment

__all__ = ["Segment", "Span", "partition"]
