"""RedSync: residual gradient compression with a cheap selection, packed messages, and dense sums where they are faster.

Source: J. Fang, H. Fu, G. Yang, C.-J. Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep
Learning Training System", 2018, arXiv:1808.04357.
"""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("hocket-redsync")

__all__ = ["__version__"]
