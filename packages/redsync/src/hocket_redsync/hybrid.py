"""Compressors that send a small share of the gradient and keep the rest, by one method or by size.

Source: Fang et al., "RedSync", sections 2.1 and 3.1 (which method for which layers).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from hocket_redsync.residual import ResidualCompressor
from hocket_redsync.selection import Method

if TYPE_CHECKING:
    from hocket.api import ParameterSpan


@dataclass(frozen=True)
class Hybrid(ResidualCompressor):
    """A method for each parameter by its size: dense, trimmed, or sampled for very large ones; or by its name.

    Attributes:
        sampled_from_kb: the size in KiB from which a threshold is searched for, by sampling.
        methods: a method for each pattern of parameters' names, as `{"*.bias": dense}`. The first pattern that matches
            applies, unless `dense_below_kb` makes the parameter dense.

    Raises:
        ValueError: a field is out of range, or a method is not known.
    """

    sampled_from_kb: float = 16384.0
    methods: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sampled_from_kb >= 0:
            raise ValueError(f"sampled_from_kb must be at least 0, not {self.sampled_from_kb}")
        for pattern, method in self.methods.items():
            if method not in set(Method):
                raise ValueError(f"methods[{pattern!r}] must be one of {', '.join(Method)}, not {method}")

    def method_of(self, span: ParameterSpan, nbytes: int) -> Method:
        for pattern, method in self.methods.items():
            if fnmatchcase(span.name, pattern):
                return Method(method)
        return Method.SAMPLED if nbytes >= self.sampled_from_kb * 1024 else Method.TRIMMED


@dataclass(frozen=True)
class _Single(ResidualCompressor):
    """One method for all parameters that are not sent whole."""

    method: ClassVar[Method]

    def method_of(self, span: ParameterSpan, nbytes: int) -> Method:
        return self.method


@dataclass(frozen=True)
class Exact(_Single):
    """The k largest, by a partition of all elements in every step, as in a simple implementation."""

    method = Method.EXACT


@dataclass(frozen=True)
class Trimmed(_Single):
    """The k largest elements, selected among the few candidates that exceed a lower bound."""

    method = Method.TRIMMED


@dataclass(frozen=True)
class Threshold(_Single):
    """All elements that reach one threshold: k to 2 k of them."""

    method = Method.THRESHOLD


@dataclass(frozen=True)
class Sampled(_Single):
    """All elements that reach a threshold, which is computed anew in every sixth step."""

    method = Method.SAMPLED
