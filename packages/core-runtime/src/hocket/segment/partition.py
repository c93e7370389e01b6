"""Segmentations, which cut a model's parameters into segments: pure functions of names, shapes and dtypes.

Parameters keep their order. A segment has one dtype and one device, so parameters are first grouped by these, and
each group is cut on its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from hocket.configured import Configured

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Every parameter starts at a multiple of this within its buffer, as it would in an allocation of its own: vector
#: units read aligned data faster. The padding is zero, and travels.
ALIGNMENT_BYTES = 64

_BYTES_PER_MB = 1 << 20


@dataclass(frozen=True)
class ParameterSpan:
    """One parameter and its offset in its segment.

    Attributes:
        name: the parameter's name in the model.
        start: its first element in the segment.
        numel: number of its elements.
        shape: its shape.
        stride: its strides, in elements, kept so that channels_last stays channels_last.
        dtype: torch dtype.
        device: torch device.
        whole_numel: number of the whole parameter's elements, where this rank holds a shard of it.
    """

    name: str
    start: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    whole_numel: int | None = None

    @property
    def stop(self) -> int:
        """Return the place after its last element, padding not included."""
        return self.start + self.numel

    @property
    def padded_numel(self) -> int:
        """Return the number of its elements in the segment, padding included."""
        return self._padded(self.numel)

    @property
    def cut_numel(self) -> int:
        """Return the number by which models are cut: the whole parameter's, so that shards are cut as it is."""
        return self._padded(self.numel if self.whole_numel is None else self.whole_numel)

    def _padded(self, numel: int) -> int:
        unit: int = ALIGNMENT_BYTES // self.dtype.itemsize
        # An empty shard has a unit, too: no message is empty.
        return max(-(-numel // unit), self.whole_numel is not None) * unit


def named_spans(
    parameters: Iterable[tuple[str, Tensor]], whole: Mapping[str, int] = MappingProxyType({})
) -> list[ParameterSpan]:
    """Return spans of parameters (name, tensor), each as if alone in its segment.

    Args:
        parameters: the parameters, or this rank's shards of them.
        whole: by name, the numbers of elements of those that are shards when whole.
    """
    return [
        ParameterSpan(
            name,
            0,
            p.numel(),
            tuple(p.shape),
            tuple(p.stride()),
            p.dtype,
            p.device,
            whole.get(name),
        )
        for name, p in parameters
    ]


class Segmentation(Configured, ABC):
    """A way to cut a model into segments; a frozen dataclass whose fields are its configuration."""

    @abstractmethod
    def cut(self, parameters: Sequence[ParameterSpan]) -> list[list[ParameterSpan]]:
        """Cut parameters of one dtype and device into runs, one for each segment, in order."""


@dataclass(frozen=True)
class Model(Segmentation):
    """A segmentation with one segment for each dtype and device of the whole model."""

    def cut(self, parameters: Sequence[ParameterSpan]) -> list[list[ParameterSpan]]:
        return [list(parameters)]


@dataclass(frozen=True)
class Layers(Segmentation):
    """A segmentation with a segment for each module that owns parameters."""

    def cut(self, parameters: Sequence[ParameterSpan]) -> list[list[ParameterSpan]]:
        layers: dict[str, list[ParameterSpan]] = {}
        for span in parameters:
            layers.setdefault(span.name.rpartition(".")[0], []).append(span)
        return list(layers.values())


@dataclass(frozen=True)
class Bytes(Segmentation):
    """A segmentation into segments of about `size_mb` MiB; a parameter is never cut.

    Attributes:
        size_mb: a segment's size in MiB (2**20 bytes), more than 0; a larger parameter gets its own segment.
        first_mb: the size of the first segment in MiB, more than 0, so that it can be sent early; each further one
            may be twice as large, up to `size_mb`. null for `size_mb`.
    """

    size_mb: float = 25.0
    first_mb: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.size_mb < math.inf:
            raise ValueError(f"size_mb must be finite and more than 0, not {self.size_mb}")
        if self.first_mb is not None and not self.first_mb > 0:
            raise ValueError(f"first_mb must be more than 0, or null, not {self.first_mb}")

    def cut(self, parameters: Sequence[ParameterSpan]) -> list[list[ParameterSpan]]:
        runs: list[list[ParameterSpan]] = []
        limits = self._limits()
        filled = limit = 0.0
        for span in parameters:
            nbytes = span.cut_numel * span.dtype.itemsize
            if not runs or filled + nbytes > limit:
                runs.append([])
                filled, limit = 0.0, next(limits)
            runs[-1].append(span)
            filled += nbytes
        return runs

    def _limits(self) -> Iterator[float]:
        """Yield the bytes that each segment may have, unless it is one parameter."""
        limit_mb = self.size_mb if self.first_mb is None else self.first_mb
        while True:
            limit_mb = min(limit_mb, self.size_mb)
            yield limit_mb * _BYTES_PER_MB
            limit_mb *= 2


class Pattern(StrEnum):
    """A distribution of layers over fragments."""

    STRIDED = "strided"
    SEQUENTIAL = "sequential"
    BALANCED = "balanced"


@dataclass(frozen=True)
class Fragments(Segmentation):
    """A segmentation into `count` groups of layers; the layers of a group need not be adjacent in the model.

    Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, section 2.1.

    Attributes:
        count: number of fragments, 1 or more; fewer if the model has fewer layers.
        pattern: `strided` puts layers q, q + count, ... into fragment q. `sequential` cuts the list of layers into
            equal runs. `balanced` repeatedly puts the largest remaining layer into the fragment with the fewest
            bytes.
    """

    count: int
    pattern: Pattern = Pattern.STRIDED

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be 1 or more, not {self.count}")

    def cut(self, parameters: Sequence[ParameterSpan]) -> list[list[ParameterSpan]]:
        layers = Layers().cut(parameters)
        count = min(self.count, len(layers))
        fragments: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        sizes = [sum(span.cut_numel for span in layer) for layer in layers]
        balanced = self.pattern is Pattern.BALANCED
        # The larger first; of layers and fragments that are alike the one that comes first.
        for layer in sorted(range(len(layers)), key=lambda layer: -sizes[layer] if balanced else 0):
            fragment = layer % count if self.pattern is Pattern.STRIDED else layer * count // len(layers)
            if balanced:
                fragment = filled.index(min(filled))
            fragments[fragment].append(layer)
            filled[fragment] += sizes[layer]
        return [[span for layer in sorted(fragment) for span in layers[layer]] for fragment in fragments]


def partition(
    spans: Sequence[ParameterSpan], segmentation: Segmentation, *, backward: bool = False
) -> list[list[ParameterSpan]]:
    """Cut a model into segments.

    Args:
        spans: the parameters, in the model's order.
        segmentation: cuts the parameters of each dtype and device.
        backward: whether to fill segments from the model's end, so that segments completed early in backward are full.

    Returns:
        The segments' spans with their offsets, in the order in which forward reads them, or with `backward` in the
        order in which backward completes them.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[ParameterSpan]] = {}
    for span in reversed(spans) if backward else spans:
        groups.setdefault((span.dtype, span.device), []).append(span)
    return [_packed(run) for group in groups.values() for run in segmentation.cut(group)]


def unusual_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Return the strides of axes longer than 1, if elements are not in the axes' order; else None.

    Tensors of one shape with the same result have their elements in one order.
    """
    axes = [(length, stride) for length, stride in zip(shape, strides, strict=True) if length > 1]
    expected = 1
    for length, stride in reversed(axes):
        if stride != expected:
            return [stride for _, stride in axes]
        expected *= length
    return None


def _packed(run: list[ParameterSpan]) -> list[ParameterSpan]:
    """Lay out the parameters of a segment one behind the other."""
    packed = []
    start = 0
    for span in run:
        packed.append(replace(span, start=start))
        start += span.padded_numel
    return packed
