"""The weight policies: the values of a stage's weights that a batch's passes read, and the use of its gradient."""

from hocket_eapipe.weights.api import Binding, NoWeights, StagePart, Weights
from hocket_eapipe.weights.elastic import Elastic
from hocket_eapipe.weights.newest import Flush, Naive, Stashing, VerticalSync
from hocket_eapipe.weights.spectrain import SpecTrain

__all__ = [
    "Binding",
    "Elastic",
    "NoWeights",
    "Flush",
    "Naive",
    "SpecTrain",
    "StagePart",
    "Stashing",
    "VerticalSync",
    "Weights",
]
