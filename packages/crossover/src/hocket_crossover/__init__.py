"""Crossover-SGD: gossip of parameters, segment by segment, over fair random graphs.

Source: S. Yeo, M. Bae, M. Jeong, O. Kwon, S. Oh, "Crossover-SGD: A gossip-based communication in distributed deep
learning for alleviating large mini-batch problem and enhancing scalability", Concurrency and Computation: Practice
and Experience 35, 2023, arXiv:2012.15198.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket_crossover.fair_random import FairRandom
from hocket_crossover.unfair import Unfair

if TYPE_CHECKING:
    from hocket_crossover.lars import LARS

__all__ = ["LARS", "FairRandom", "Unfair"]


def __getattr__(name: str) -> object:
    # The optimizer needs torch, which composing a strategy does not.
    if name == "LARS":
        from hocket_crossover.lars import LARS

        return LARS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
