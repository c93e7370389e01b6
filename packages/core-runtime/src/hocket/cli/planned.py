"""The run that `hocket plan` looks at, and its plans."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hocket.cli.combinations import target_and_overrides
from hocket.config.settings import TransportName
from hocket.errors import UserError
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, build_engine, load_run
from hocket.transport.hosts import Host, share_out

if TYPE_CHECKING:
    from torch import nn

    from hocket.plan.plan import Plan
    from hocket.strategy.strategy import Strategy

__all__ = ["held_up", "planned_for", "planned_run"]

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
    run = load_run(target, overrides)
    shared = share_out(hosts, ranks) if hosts else ()
    run = replace(run, ranks=sum(host.ranks for host in shared) or ranks or run.ranks or _DEFAULT_RANKS)
    assert run.ranks is not None
    run.check_size(run.ranks)
    replicas = build_engine(run).data_size(run.ranks)
    if not shared:
        return run, Placement.on_one_host(replicas)
    if replicas != run.ranks:
        raise UserError(
            f"--hosts: engine {run.engine.name} divides the model over ranks, and hosts are not planned for such "
            "engines: leave it out"
        )
    return run, Placement.of_counts([host.ranks for host in shared])


def planned_for(
    run: RunConfig, strategy: Strategy, model: nn.Module, placement: Placement, bandwidth: float
) -> Plan:
    """Return the plan for links of `bandwidth` bits per second."""
    from hocket.plan.plan import plan
    from hocket.transport.host import SMALLEST_BYTES

    shared_bytes = math.inf if run.transport is TransportName.VIRTUAL else SMALLEST_BYTES
    network = replace(run.network, bandwidth_bits_per_s=bandwidth)
    return plan(strategy, model, placement, network, shared_bytes=shared_bytes)


def held_up(run: RunConfig, plan: Plan) -> float:
    """Return the mean seconds of a step in which a rank is held up by the run's delays."""
    from hocket.plan.lateness import held_up_seconds

    return 0.0 if run.delays is None else held_up_seconds(plan, run.compute.step_s, run.delays, run.seed)
