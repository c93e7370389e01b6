"""The situation for which strategies are planned: a model, its replicas' hosts, and the network between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from hocket.config.settings import RunSettings, TransportName
from hocket.plan.lateness import held_up_seconds
from hocket.plan.plan import Plan, plan
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Strategy
from hocket.transport.host import SMALLEST_BYTES


@dataclass(frozen=True)
class TrainingSituation:
    """The model, the placement of its replicas and the settings of a run, for which strategies are planned.

    Attributes:
        model: of which names, shapes and dtypes are used.
        placement: the hosts of the replicas, which are ranks or islands.
        settings: the network, the computing of a step, late ranks and islands.
        divided: by name, the number of an island's ranks among which a parameter is divided; 1 for
            others.
    """

    model: nn.Module
    placement: Placement
    settings: RunSettings
    divided: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks, of all islands."""
        return self.placement.size * self.settings.island.ranks

    def plan(self, strategy: Strategy, bandwidth: float | None = None) -> Plan:
        """Plan a strategy here, or with links of `bandwidth` bits per second, which the ranks of an island share."""
        settings = self.settings
        shared_bytes = math.inf if settings.transport is TransportName.VIRTUAL else SMALLEST_BYTES
        share = (bandwidth or settings.network.bandwidth_bits_per_s) / settings.island.ranks
        network = replace(settings.network, bandwidth_bits_per_s=share)
        return plan(
            strategy, self.model, self.placement, network, shared_bytes=shared_bytes, island=self.divided
        )

    def held_up_seconds(self, plan: Plan) -> float:
        """Return the mean seconds of a step in which late ranks hold up a rank."""
        settings = self.settings
        if settings.delays is None:
            return 0.0
        step_s, size = settings.compute.step_s, settings.island.ranks
        return held_up_seconds(plan, step_s, settings.delays, settings.seed, size)

    def idle(self, strategy: Strategy) -> str:
        """Return the exchanges that have no two ranks here, such as those within hosts of one rank."""
        return ", ".join(
            each.name
            for each in strategy.exchanges
            if not any(each.takes_place(len(part)) for part in each.over.parts(self.placement))
        )
