"""EA-Pipe: pipeline parallelism in which N replicas of each stage and a master pull each other elastically.

Source: "Pipeline Parallelism With Elastic Averaging", IEEE Access 12, 2024, p. 5477-5489; and the
baselines it is compared with: PipeDream (weight stashing, vertical sync), SpecTrain, and GPipe's flush.

This module imports no torch.
"""

from hocket_eapipe.configuration import Balance, BatchNormStatistics, Policy
from hocket_eapipe.pipeline import Pipeline

__all__ = ["Balance", "BatchNormStatistics", "Pipeline", "Policy"]
