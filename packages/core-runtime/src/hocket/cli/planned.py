"""The run that `hocket plan` looks at, and the placement of its replicas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hocket.cli.combinations import target_and_overrides
from hocket.cli.network_options import GivenModel
from hocket.errors import UserError
from hocket.launch.hosts import Host, share_out
from hocket.plan.models import model_of
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, build_engine, load_run

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.situation import TrainingSituation
    from hocket.strategy.strategy import Strategy
    from hocket.task import Task

#: The number of ranks to plan for by default.
_DEFAULT_RANKS = 4


def planned_run(
    target: str, overrides: tuple[str, ...], ranks: int | None, hosts: Sequence[Host]
) -> tuple[RunConfig, Placement]:
    """Return the run to plan, with its number of ranks, and its replicas' placement; without torch.

    Args, Raises: as in `plan_command`; a recipe or a file may be followed by overrides of its own.
    """
    if not os.path.isfile(target) and "=" in target:
        target, together = target_and_overrides(target, overrides, repr(target))
        overrides = tuple(together)
    return placed_run(load_run(target, overrides), ranks, hosts)


def placed_run(run: RunConfig, ranks: int | None, hosts: Sequence[Host]) -> tuple[RunConfig, Placement]:
    """Return a run with its number of ranks, and its replicas' placement.

    Args, Raises: as in `plan_command`.
    """
    shared = share_out(hosts, ranks) if hosts else ()
    run = replace(run, ranks=sum(host.ranks for host in shared) or ranks or run.ranks or _DEFAULT_RANKS)
    assert run.ranks is not None
    run.check_size(run.ranks)
    if not shared:
        return run, Placement.on_one_host(run.replicas(run.ranks))
    if build_engine(run).data_size(run.ranks) != run.ranks:
        raise UserError(
            f"--hosts: engine {run.engine.name} divides the model over ranks, and `hocket plan` does not "
            "support hosts with such engines: leave --hosts out"
        )
    return run, placed(run, [host.ranks for host in shared])


def placed(run: RunConfig, ranks_of_hosts: Sequence[int]) -> Placement:
    """Return the placement of a run's replicas, which are its ranks or its islands.

    Raises:
        UserError: a host holds no whole number of islands.
    """
    island = run.island.ranks
    if any(ranks % island for ranks in ranks_of_hosts):
        raise UserError(
            f"islands of {island} ranks do not fit hosts of {' and '.join(map(str, sorted(set(ranks_of_hosts))))} "
            "ranks: choose an island size that divides these numbers. An island over several hosts counts as one host: "
            f"--hosts ISLANDSx{island}, with the bandwidth of its link"
        )
    return Placement.of_counts([ranks // island for ranks in ranks_of_hosts])


def situation_of(
    run: RunConfig, task: Task, placement: Placement, given: GivenModel | None
) -> TrainingSituation:
    """Return the situation of a run, with the model of its task or a given one.

    Raises:
        CompositionError: the task's model cannot be divided as the run says.
    """
    from hocket.plan.situation import TrainingSituation
    from hocket.training.tensor_parallel import ranks_of_parameters

    if given is None:
        model = model_of(task.model)
        return TrainingSituation(model, placement, run, ranks_of_parameters(run, task, model))
    _, model = given
    equally = run.island.shard * run.island.tensor
    divided = dict.fromkeys((name for name, _ in model.named_parameters()), equally)
    return TrainingSituation(model, placement, run, divided)


def planned_with_copy(run: RunConfig, situation: TrainingSituation, strategy: Strategy) -> Plan:
    """Return the plan of a run's strategy, with the copy from which checkpoints beside training are written."""
    from hocket.config.optimizer import build_optimizers
    from hocket.plan.saved import saved_bytes
    from hocket.session.engine import DataParallel

    plan = situation.plan(strategy)
    saves_beside = run.checkpoint.every is not None and not run.checkpoint.blocking
    if not saves_beside or not isinstance(build_engine(run), DataParallel):
        return plan
    build = partial(build_optimizers, run.optimizer)
    return replace(plan, copied_bytes=saved_bytes(plan, situation.model, build, situation.divided))
