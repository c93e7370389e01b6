"""The shape of a segment: what the length of its messages depends on, known before there are buffers."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hocket.segment.partition import ParameterSpan


class SegmentShape:
    """The parameters of a segment and the length of its trailer; a `Segment`, or a layout before there is one.

    Attributes:
        spans: the parameters and their places.
        trailer_numel: how many numbers travel behind the data.
    """

    spans: tuple[ParameterSpan, ...]
    trailer_numel: int

    @cached_property
    def numel(self) -> int:
        """Elements of data, padding included."""
        last = self.spans[-1]
        return last.start + last.padded_numel

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the buffers: float32, or float64 where the parameters are."""
        return wire_dtype(self.spans[0].dtype)

    @property
    def trailer_bytes(self) -> int:
        """Bytes of the trailer."""
        return self.trailer_numel * self.dtype.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes of what one rank contributes, uncompressed: data and trailer."""
        return (self.numel + self.trailer_numel) * self.dtype.itemsize

    def check_indexable(self) -> None:
        """Refuse a segment that is too long for indices of type int32.

        Raises:
            ValueError: 2**31 elements or more.
        """
        if self.numel >= 2**31:
            raise ValueError(
                f"a segment of {self.numel} elements is too long for int32 indices: use smaller segments (segments: "
                "layers or bytes)"
            )


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed on the wire.

    float16 and bfloat16 travel as float32: MPI sums float16 in float16, and does not know bfloat16.
    """
    import torch

    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
