"""How a model is cut into segments: pure functions of names, shapes and dtypes, used by sessions and by `plan`.

Parameters keep their order. A segment has one dtype and one device, so parameters are first grouped by these, and
each group is cut on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.strategy.segmentation import Bytes, Layers, Model, Segmentation

__all__ = ["ALIGNMENT_BYTES", "Span", "named_spans", "partition"]

#: Every parameter starts at a multiple of this within its buffer, as it would in an allocation of its own: vector
#: units read aligned data faster. The padding is zero, and travels.
ALIGNMENT_BYTES = 64

_BYTES_PER_MB = 1 << 20


@dataclass(frozen=True)
class Span:
    """Where one parameter lies in its segment.

    Attributes:
        name: the parameter's name in the model.
        start: its first element in the segment.
        numel: how many elements it has.
        shape: its shape.
        stride: its strides, in elements, kept so that channels_last stays channels_last.
        dtype: torch dtype.
        device: torch device.
    """

    name: str
    start: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any

    @property
    def stop(self) -> int:
        """One past its last element, the padding not included."""
        return self.start + self.numel

    @property
    def padded_numel(self) -> int:
        """How many elements it takes in the segment."""
        unit = ALIGNMENT_BYTES // self.dtype.itemsize
        return -(-self.numel // unit) * unit

    def at(self, start: int) -> Span:
        """Return the same parameter at another place."""
        return Span(self.name, start, self.numel, self.shape, self.stride, self.dtype, self.device)


def named_spans(parameters: Iterable[tuple[str, Any]]) -> list[Span]:
    """Describe parameters (name, tensor), each as if alone in its segment."""
    return [
        Span(name, 0, p.numel(), tuple(p.shape), tuple(p.stride()), p.dtype, p.device)
        for name, p in parameters
    ]


def partition(
    spans: Sequence[Span], segmentation: Segmentation, *, backward: bool = False
) -> list[list[Span]]:
    """Cut a model into segments.

    Args:
        spans: the parameters, in the model's order.
        segmentation: `model`, `layers` (a segment for each module that owns parameters) or `bytes` (runs of about
            so many bytes; a parameter is never cut).
        backward: fill segments from the model's end, so that those which are complete early in backward are full.

    Returns:
        The segments' spans with their places, in the order in which forward reads them, or with `backward` in the
        order in which backward completes them.
    """
    groups: dict[tuple[Any, Any], list[Span]] = {}
    for span in reversed(spans) if backward else spans:
        groups.setdefault((span.dtype, span.device), []).append(span)
    return [_placed(run) for group in groups.values() for run in _cut(group, segmentation)]


def _cut(group: list[Span], segmentation: Segmentation) -> list[list[Span]]:
    match segmentation:
        case Model():
            return [group]
        case Layers():
            return _runs_by_layer(group)
        case Bytes(size_mb=size_mb):
            return _runs_by_bytes(group, size_mb * _BYTES_PER_MB)
    raise TypeError(f"{segmentation!r} is no segmentation")


def _runs_by_layer(group: list[Span]) -> list[list[Span]]:
    layers: dict[str, list[Span]] = {}
    for span in group:
        layers.setdefault(span.name.rpartition(".")[0], []).append(span)
    return list(layers.values())


def _runs_by_bytes(group: list[Span], limit: float) -> list[list[Span]]:
    runs: list[list[Span]] = []
    filled = 0.0
    for span in group:
        nbytes = span.padded_numel * span.dtype.itemsize
        if not runs or filled + nbytes > limit:
            runs.append([])
            filled = 0
        runs[-1].append(span)
        filled += nbytes
    return runs


def _placed(run: list[Span]) -> list[Span]:
    placed = []
    start = 0
    for span in run:
        placed.append(span.at(start))
        start += span.padded_numel
    return placed
