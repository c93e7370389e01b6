"""Injected imbalance: how long which rank of a run is held up in which step; any strategy, any task."""

from hocket.delays.api import ComputeModel, Delays
from hocket.delays.patterns import Fixed, LinearSkew, RandomSubset, ShiftingSkew
from hocket.delays.recorded import Recorded

__all__ = ["ComputeModel", "Delays", "Fixed", "LinearSkew", "RandomSubset", "Recorded", "ShiftingSkew"]
