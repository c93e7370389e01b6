"""What crosses the wire at the moments of a training step: slots, exchanges, composition. Needs no torch."""

from hocket.strategy.compose import compose
from hocket.strategy.exchange import Exchange, Overlap
from hocket.strategy.rules import Refusal, refusals
from hocket.strategy.samples import SampleExchange, SampleStream
from hocket.strategy.scope import Scope, World
from hocket.strategy.segmentation import Bytes, Layers, Model, Segmentation
from hocket.strategy.strategy import Strategy

__all__ = [
    "Bytes",
    "Exchange",
    "Layers",
    "Model",
    "Overlap",
    "Refusal",
    "SampleExchange",
    "SampleStream",
    "Scope",
    "Segmentation",
    "Strategy",
    "World",
    "compose",
    "refusals",
]
