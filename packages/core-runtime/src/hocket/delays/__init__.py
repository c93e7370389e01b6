"""Injected imbalance: delays of a run's ranks in its steps, for any strategy and task."""

from hocket.delays.api import ComputeModel, Delays
from hocket.delays.patterns import Fixed, LinearSkew, RandomSubset, ShiftingSkew
from hocket.delays.recorded import Recorded

__all__ = ["ComputeModel", "Delays", "Fixed", "LinearSkew", "RandomSubset", "Recorded", "ShiftingSkew"]
