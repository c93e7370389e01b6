"""Core's own components, registered as a plugin registers its own, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hocket.plugin.markers import hookimpl

if TYPE_CHECKING:
    from hocket.plugin.registrar import Registrar

_RECIPES = Path(__file__).parent.parent / "strategy" / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the components and recipes of hocket-core."""
    registry.collective("allreduce", "hocket.collective.allreduce:Allreduce")
    registry.collective("broadcast", "hocket.collective.rooted:Broadcast")
    registry.collective("gossip", "hocket.collective.gossip:Gossip")
    registry.collective("reduce", "hocket.collective.rooted:Reduce")
    registry.collective("sparse_allreduce", "hocket.collective.sparse:SparseAllreduce")
    registry.topology("complete", "hocket.topology.plain:Complete")
    registry.topology("exponential", "hocket.topology.plain:Exponential")
    registry.topology("irregular_directed", "hocket.topology.drawn:IrregularDirected")
    registry.topology("random_matching", "hocket.topology.drawn:RandomMatching")
    registry.topology("ring", "hocket.topology.plain:Ring")
    registry.compressor("none", "hocket.compressor.wrapper:Identity")
    registry.compressor("fp16", "hocket.compressor.cast:Float16")
    registry.compressor("bf16", "hocket.compressor.cast:BFloat16")
    registry.compressor("topk", "hocket.compressor.topk:TopK")
    registry.compressor("shared_random", "hocket.compressor.shared_random:SharedRandom")
    registry.compressor("error_feedback", "hocket.compressor.error_feedback:ErrorFeedback")
    registry.compressor("momentum_correction", "hocket.compressor.momentum_correction:MomentumCorrection")
    registry.compressor("local_clipping", "hocket.compressor.local_clipping:LocalClipping")
    registry.scope("group", "hocket.strategy.scope:Group")
    registry.scope("leaders", "hocket.strategy.scope:Leaders")
    registry.scope("world", "hocket.strategy.scope:World")
    registry.segmentation("model", "hocket.segment.partition:Model")
    registry.segmentation("layers", "hocket.segment.partition:Layers")
    registry.segmentation("bytes", "hocket.segment.partition:Bytes")
    registry.segmentation("fragments", "hocket.segment.partition:Fragments")
    registry.outer("sgd", "hocket.outer.sgd:Sgd")
    registry.merge("add", "hocket.outer.merge:AddDisplacement")
    registry.merge("blend", "hocket.outer.merge:Blend")
    registry.engine("data_parallel", "hocket.session.engine:DataParallel")
    registry.task("digits", "hocket.task.digits:Digits")
    registry.delays("fixed", "hocket.delays.patterns:Fixed")
    registry.delays("random_subset", "hocket.delays.patterns:RandomSubset")
    registry.delays("linear_skew", "hocket.delays.patterns:LinearSkew")
    registry.delays("shifting_skew", "hocket.delays.patterns:ShiftingSkew")
    registry.delays("file", "hocket.delays.recorded:Recorded")
    registry.logger("jsonl", "hocket.loggers.files:JsonLines")
    registry.logger("csv", "hocket.loggers.files:Csv")
    registry.logger("tensorboard", "hocket.loggers.services:TensorBoard")
    registry.logger("wandb", "hocket.loggers.services:Wandb")
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
