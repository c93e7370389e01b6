"""The cost of sparse and dense synchronisation, and the number of ranks from which sparse stops paying.

p ranks, a parameter of M elements of which k are sent, in a message of m bytes:

    T_sparse = M s + lg(p) a + (p - 1) m b + p k g1
    T_dense  = 2 lg(p) a' + 2 (p - 1) / p M w b'

a and a' are latencies, b and b' seconds per byte, of a gather and of an allreduce; s is what accumulating and selecting
an element takes, g1 adding one that was received; w bytes an element has. Bytes and additions grow with p, so from
some number of ranks on dense is cheaper.

Source: Fang et al., "RedSync", equations 1 and 2. There, b is the same for both and the reduction's own cost is a term
g2; here b' is measured on an allreduce, which holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.api import NetworkModel

__all__ = ["CostModel"]


@dataclass(frozen=True)
class CostModel:
    """The constants of one machine and network. All but the first four are of a core, not of the network.

    Attributes:
        gather_latency_s: a, in seconds.
        gather_s_per_byte: b.
        reduce_latency_s: a'.
        reduce_s_per_byte: b'.
        select_s_per_element: s. The default was measured on one core of a server.
        add_s_per_element: g1; the same.

    Raises:
        ValueError: a number below 0, NaN or Inf.
    """

    gather_latency_s: float
    gather_s_per_byte: float
    reduce_latency_s: float
    reduce_s_per_byte: float
    select_s_per_element: float = 5e-10
    add_s_per_element: float = 3e-9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, not {value}")

    @staticmethod
    def of_network(network: NetworkModel) -> CostModel:
        """Return the model of a network that is only described, as `plan` has it."""
        byte_s = network.link_seconds(1)
        return CostModel(network.latency_s, byte_s, network.latency_s, byte_s)

    def sparse_seconds(self, numel: float, sent: float, message_bytes: float, size: int) -> float:
        """Return T_sparse but for its latency, in seconds.

        Args:
            numel: M.
            sent: k.
            message_bytes: m.
            size: p.
        """
        network = (size - 1) * message_bytes * self.gather_s_per_byte
        return numel * self.select_s_per_element + network + size * sent * self.add_s_per_element

    def dense_seconds(self, nbytes: float, size: int) -> float:
        """Return T_dense but for its latency, in seconds; `nbytes` is M w."""
        return 2 * (size - 1) / size * nbytes * self.reduce_s_per_byte

    def gather_latency(self, size: int) -> float:
        """Return lg(p) a, in seconds."""
        return _doublings(size) * self.gather_latency_s

    def reduce_latency(self, size: int) -> float:
        """Return 2 lg(p) a', in seconds."""
        return 2 * _doublings(size) * self.reduce_latency_s


def _doublings(size: int) -> int:
    return (size - 1).bit_length()
