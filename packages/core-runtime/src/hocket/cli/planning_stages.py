"""The part of `hocket plan` for engines that divide a model over ranks: the cost of each stage."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import cast

import torch

from hocket.cli.table import show_table
from hocket.config.optimizer import build_optimizer
from hocket.quantities import format_bytes
from hocket.session.engine import Engine, PlannedStage
from hocket.task.api import Task
from hocket.task.samples import batch_of
from hocket.training.run import RunConfig

_HEADERS = ("stage", "modules", "parameters", "weights", "optimizer", "activations", "peak", "sent per batch")


def stages_of(run: RunConfig, engine: Engine, task: Task) -> tuple[PlannedStage, ...]:
    """Plan the model's stages on a batch of the run's size; none if every rank holds a whole model."""
    assert run.ranks is not None
    if type(engine).plan_stages is Engine.plan_stages:
        return ()
    torch.manual_seed(run.seed)
    model = task.model()
    samples = task.data(run.seed).train
    batch = batch_of(samples, range(min(run.batch_size, len(cast(Sized, samples)))))
    optimizer = build_optimizer(run.optimizer, model.parameters())
    return engine.plan_stages(model, optimizer, batch, task.loss, run.ranks)


def show_stages(stages: Sequence[PlannedStage], replicas: int) -> None:
    """Print a row for each stage."""
    rows = [
        (
            str(number),
            stage.name,
            f"{stage.num_parameters:,}",
            format_bytes(stage.weights_bytes),
            format_bytes(stage.optimizer_bytes),
            format_bytes(stage.activations_bytes),
            format_bytes(stage.peak_bytes),
            format_bytes(stage.sent_bytes),
        )
        for number, stage in enumerate(stages, 1)
    ]
    show_table(_HEADERS, rows, numbers=_HEADERS[2:])
    print()
    print(
        "- Memory of one rank of each stage, measured with one batch: all copies of its weights, the states of their\n"
        "  optimizers, the activations that batches under way keep for backward, and the peak of all these with the\n"
        "  gradients. The buffers of a strategy's exchanges come on top."
    )
    if replicas > 1:
        print(
            f"- There are {replicas} replicas of the model. Exchanges take place stage by stage: the figures above\n"
            "  are for the whole model, and are divided over the ranks of a pipeline."
        )
