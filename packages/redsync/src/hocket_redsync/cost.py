"""The cost of sparse and dense synchronisation, and the number of ranks from which sparse stops paying.

p ranks, a parameter of M elements of which k are sent, in a message of m bytes:

    T_sparse   = M s + lg(p) a + (p - 1) m b + p k g1
    T_scalable = M s + (1 + lg(p)) a'' + 2.5 (p - 1) / p m b + 2 k g1
    T_dense    = 2 lg(p) a' + 2 (p - 1) / p M w b'

a, a' and a'' are latencies, b and b' seconds per byte, of a gather, of an allreduce and of a scalable sparse one; s is
what accumulating and selecting an element takes, g1 adding one that was received; w bytes an element has. A gather's
bytes and additions grow with p, so from some number of ranks on the others are cheaper.

Source: Fang et al., "RedSync", equations 1 and 2. There, b is the same for both and the reduction's own cost is a term
g2; here b' is measured on an allreduce, which holds it. T_scalable is that of `hocket.collective.scalable`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.api import NetworkModel


@dataclass(frozen=True)
class CostModel:
    """The constants of one machine and network; s and g1 are of a core.

    Attributes:
        gather_latency_s: a, in seconds.
        gather_s_per_byte: b.
        reduce_latency_s: a'.
        reduce_s_per_byte: b'.
        select_s_per_element: s. The default was measured on one core of a server.
        add_s_per_element: g1; the same.
        scalable_latency_s: a''; None for a.

    Raises:
        ValueError: a number below 0, NaN or Inf.
    """

    gather_latency_s: float
    gather_s_per_byte: float
    reduce_latency_s: float
    reduce_s_per_byte: float
    select_s_per_element: float = 5e-10
    add_s_per_element: float = 3e-9
    scalable_latency_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, not {value}")

    @staticmethod
    def of_network(network: NetworkModel) -> CostModel:
        """Return the model of a network from its description alone, for `plan`."""
        byte_s = network.link_seconds(1)
        return CostModel(network.latency_s, byte_s, network.latency_s, byte_s)

    def sparse_seconds(self, numel: float, added: float, bytes_to_each: float, size: int) -> float:
        """Return T_sparse or T_scalable but for its latency, in seconds.

        Args:
            numel: M.
            added: the elements that a rank adds: p k, or 2 k where it is scalable.
            bytes_to_each: the bytes that a rank sends to each other rank: m, or 2.5 m / p.
            size: p.
        """
        network = (size - 1) * bytes_to_each * self.gather_s_per_byte
        return numel * self.select_s_per_element + network + added * self.add_s_per_element

    def dense_seconds(self, nbytes: float, size: int) -> float:
        """Return T_dense but for its latency, in seconds; `nbytes` is M w."""
        return 2 * (size - 1) / size * nbytes * self.reduce_s_per_byte

    def gather_latency(self, size: int) -> float:
        """Return lg(p) a, in seconds."""
        return _doublings(size) * self.gather_latency_s

    def scalable_latency(self, size: int) -> float:
        """Return (1 + lg(p)) a'', in seconds."""
        latency_s = self.gather_latency_s if self.scalable_latency_s is None else self.scalable_latency_s
        return (1 + _doublings(size)) * latency_s

    def reduce_latency(self, size: int) -> float:
        """Return 2 lg(p) a', in seconds."""
        return 2 * _doublings(size) * self.reduce_latency_s


def _doublings(size: int) -> int:
    return (size - 1).bit_length()
