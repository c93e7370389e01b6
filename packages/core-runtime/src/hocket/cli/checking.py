"""Find out before ranks are started what every one of them would find out."""

from __future__ import annotations

from hocket.task.api import Task
from hocket.training.run import RunConfig, build_engine, build_task

__all__ = ["check_run"]


def check_run(run: RunConfig) -> Task:
    """Build the parts of a run that need torch, and return its task.

    Raises:
        ConfigError: a wrong name, argument or value.
        AttachError: the strategy cannot do with the optimizer.
    """
    import torch

    from hocket.config.optimizer import build_optimizer
    from hocket.config.scheduler import build_scheduler
    from hocket.session.refusals import check_optimizer_terms
    from hocket.training.meters import meters_of

    task = build_task(run)
    meters_of(task, None)
    build_engine(run)
    # Of two axes: some optimizers take only matrices.
    optimizer = build_optimizer(run.optimizer, [torch.zeros(1, 1, requires_grad=True)])
    check_optimizer_terms(run.strategy, optimizer)
    for scheduler in run.schedulers:
        build_scheduler(scheduler, optimizer)
    return task
