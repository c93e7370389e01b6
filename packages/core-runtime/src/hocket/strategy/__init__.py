"""Strategies: slots of exchanges at the moments of a training step, and their composition. Needs no torch."""

from hocket.segment.partition import Bytes, Layers, Model, Segmentation
from hocket.strategy.compose import check_composition, compose
from hocket.strategy.exchange import Every, Exchange, Overlap, ProgressMode
from hocket.strategy.rules import Refusal, refusals
from hocket.strategy.samples import SampleShuffle, SampleStream
from hocket.strategy.scope import Group, Leaders, Placement, Scope, World
from hocket.strategy.strategy import Strategy

__all__ = [
    "Bytes",
    "Every",
    "Exchange",
    "Group",
    "Layers",
    "Leaders",
    "Model",
    "Overlap",
    "Placement",
    "ProgressMode",
    "Refusal",
    "SampleShuffle",
    "SampleStream",
    "Scope",
    "Segmentation",
    "Strategy",
    "World",
    "check_composition",
    "compose",
    "refusals",
]
