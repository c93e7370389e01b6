"""PowerSGD: low-rank approximations of gradients, which an allreduce sums.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv:1905.13727.

This module imports no torch.
"""

from hocket_powersgd.compressor import PowerSGD

__all__ = ["PowerSGD"]
