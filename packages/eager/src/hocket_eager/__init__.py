"""Eager-SGD: allreduces that a few ranks start and complete, with what the others have ready.

Source: S. Li, T. Ben-Nun, S. Di Girolamo, D. Alistarh, T. Hoefler, "Taming Unbalanced Training Workloads in Deep
Learning with Partial Collective Operations", PPoPP 2020, arXiv:1908.04207.

This module imports no torch.
"""

from hocket_eager.collective import Algorithm, PartialAllreduce
from hocket_eager.rules import Delivery, Quorum, QuorumRules

__all__ = ["Algorithm", "Delivery", "PartialAllreduce", "Quorum", "QuorumRules"]
