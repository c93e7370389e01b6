"""Injected imbalance: how long which rank of a run is held up in which step; any strategy, any task."""

from hocket.delays.api import Delays
from hocket.delays.chosen import Fixed, RandomSubset
from hocket.delays.compute import ComputeModel
from hocket.delays.recorded import Recorded
from hocket.delays.skew import LinearSkew, ShiftingSkew

__all__ = ["ComputeModel", "Delays", "Fixed", "LinearSkew", "RandomSubset", "Recorded", "ShiftingSkew"]
