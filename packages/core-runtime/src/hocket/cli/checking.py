"""The checks of a run before its ranks are started."""

from __future__ import annotations

from hocket.disk import path_of
from hocket.task.api import Task, TaskData
from hocket.task.user import exits_refused
from hocket.training.run import RunConfig, build_engine, build_task


def checked_data(run: RunConfig, resume: bool) -> TaskData:
    """Check a run and, unless it goes on, the model that it begins with; return its task's data.

    Raises:
        CheckpointError: there is no model to begin with.
        ConfigError: the task ends the process.
        CompositionError: the model cannot be divided as the run's islands say.
    """
    from hocket.checkpoint.model_files import open_model

    if run.start_from is not None and not resume:
        with open_model(path_of(run.start_from, "start_from")):
            pass
    with exits_refused(run.task.name):
        task = check_run(run)
        check_tensor_plan(run, task)
        return task.data(run.seed)


def check_tensor_plan(run: RunConfig, task: Task) -> None:
    """Check a task's plan of tensor parallelism, if the run's islands need one.

    Raises:
        CompositionError: there is none, or the model does not divide so.
    """
    from hocket.plan.models import model_of
    from hocket.training.tensor_parallel import checked_plan

    if run.island.tensor > 1:
        checked_plan(run, task, model_of(task.model))


def check_run(run: RunConfig) -> Task:
    """Build the parts of a run that need torch, and return its task.

    Raises:
        UserError: a library that a logger needs is not installed.
        ConfigError: a wrong name, argument or value.
        AttachError: the strategy does not work with the optimizer, or in islands.
    """
    import torch

    from hocket.config.optimizer import build_optimizers
    from hocket.session.island_refusals import check_sharded
    from hocket.session.refusals import check_optimizer_terms
    from hocket.training.meters import meters_of
    from hocket.training.schedules import Schedules
    from hocket.training.tensor_parallel import refuse_lists

    for logger in run.loggers:
        logger.check()
    task = build_task(run)
    meters_of(task, None)
    build_engine(run)
    # Two matrices, a hidden one and one that is not: some optimizers take nothing else.
    stand_in = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
    optimizers = build_optimizers(run.optimizer, stand_in)
    for optimizer in optimizers:
        check_optimizer_terms(run.strategy, optimizer)
    if run.island.ranks > 1:
        check_sharded(optimizers, run.strategy)
    if run.island.tensor > 1:
        refuse_lists(optimizers)
    Schedules(run.schedulers, optimizers).check()
    return task
