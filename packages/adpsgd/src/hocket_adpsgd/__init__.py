"""AD-PSGD: averages of two ranks at a time, while both compute.

Source: X. Lian, W. Zhang, C. Zhang, J. Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML
2018, arXiv:1710.06952.

This module imports no torch.
"""

from hocket_adpsgd.pair_average import PairAverage

__all__ = ["PairAverage"]
