"""Advice on strategies: the step that each is predicted to take, its measured cost, and the one to try first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hocket.config.settings import IslandSettings
from hocket.plan.plan import Plan, plan
from hocket.plan.utilisation import BANDWIDTHS, exposed_seconds
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Strategy
from hocket.transport.network import NetworkModel

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays

__all__ = [
    "CLOSE",
    "ERROR",
    "PLAIN",
    "Advice",
    "AdvisedStrategy",
    "Prediction",
    "AdviceRow",
    "TrainingSituation",
    "predict",
]

#: The recipe that changes nothing and sends while backward goes on, as DDP does.
PLAIN = "agd"

#: What takes no longer than this many times another is as fast.
CLOSE = 1.05

#: The factor by which predictions differ from measurements on four hosts, but for `eager.solo` (docs/choosing.md).
ERROR = 1.3


@dataclass(frozen=True)
class Prediction:
    """The predicted costs of a strategy.

    Attributes:
        step_s: seconds of a step, on average.
        exposed_s: of these, seconds that a rank waits for messages.
        held_up_s: of these, seconds that late ranks hold it up, itself included.
        packing_s: of these, seconds that it compresses; 0 if not measured.
        bytes_per_step: bytes that a rank sends, on average.
        memory_bytes: bytes of the exchanges' buffers on a rank.
    """

    step_s: float
    exposed_s: float
    held_up_s: float
    packing_s: float
    bytes_per_step: float
    memory_bytes: int


def predict(plan: Plan, step_s: float, held_up_s: float = 0.0, packing_s: float = 0.0) -> Prediction:
    """Predict a strategy's step.

    Args:
        plan: of its exchanges.
        step_s: seconds of computing in a step.
        held_up_s: of `held_up_seconds`; 0 if no rank is late.
        packing_s: seconds of a step that compressors compute.
    """
    exposed_s = exposed_seconds(plan, step_s)
    together_s = step_s + exposed_s + held_up_s + packing_s
    return Prediction(together_s, exposed_s, held_up_s, packing_s, plan.bytes_per_step, plan.memory_bytes)


@dataclass(frozen=True)
class AdvisedStrategy:
    """A strategy to compare.

    Attributes:
        name: the recipe's name with its changed settings, or the file's.
        spelled: the strategy as `hocket sweep strategy=...` takes it.
        strategy: without phases.
        is_exact: True if a step is known to give the mean of all gradients.
        is_own: True if the user named it.
        loss_percent, accuracy_points: the measured difference from synchronous SGD; None where not measured.
        notes: sentences on what it changes, and what that cost in which test.
    """

    name: str
    spelled: str
    strategy: Strategy
    is_exact: bool = False
    is_own: bool = False
    loss_percent: float | None = None
    accuracy_points: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The plugin that it comes from, or the recipe of core."""
        return re.split(r"[., ]", self.name)[0]


@dataclass(frozen=True)
class TrainingSituation:
    """The model, hosts and network for which strategies are compared.

    Attributes:
        model: of which names, shapes and dtypes are used.
        placement: the ranks' hosts.
        network: between hosts.
        step_s: seconds that a step computes.
        delays: of late ranks; None for none.
        seed: of delays that are drawn.
        by_accuracy: compare measured costs by the accuracy of SGD, in place of the loss of AdamW.
        packs: measure the time that compressors compute on this machine.
        island: the ranks that hold one replica together, each of which `placement` counts as one.
    """

    model: nn.Module
    placement: Placement
    network: NetworkModel
    step_s: float
    delays: Delays | None = None
    seed: int = 0
    by_accuracy: bool = False
    packs: bool = False
    island: IslandSettings = field(default_factory=IslandSettings)

    @property
    def ranks(self) -> int:
        """The number of ranks, of all islands."""
        return self.placement.size * self.island.ranks

    def plan(self, strategy: Strategy, bandwidth: float | None = None) -> Plan:
        """Plan a strategy here, or with links of `bandwidth` bits per second, which the ranks of an island share."""
        shared = (bandwidth or self.network.bandwidth_bits_per_s) / self.island.ranks
        network = replace(self.network, bandwidth_bits_per_s=shared)
        return plan(strategy, self.model, self.placement, network, island=self.island.shard)

    def idle(self, strategy: Strategy) -> str:
        """Return the exchanges that have no two ranks here, such as those within hosts of one rank."""
        return ", ".join(
            each.name
            for each in strategy.exchanges
            if not any(each.takes_place(len(part)) for part in each.over.parts(self.placement))
        )

    def predict(self, candidate: AdvisedStrategy) -> Prediction:
        """Predict a candidate's step."""
        from hocket.plan.lateness import held_up_seconds
        from hocket.plan.packing_time import packing_seconds

        costs, held_up_s = self.plan(candidate.strategy), 0.0
        if self.delays is not None:
            held_up_s = held_up_seconds(costs, self.step_s, self.delays, self.seed, self.island.ranks)
        return predict(costs, self.step_s, held_up_s, packing_seconds(costs) if self.packs else 0.0)

    def step_seconds(self, row: AdviceRow, bandwidth: float) -> float:
        """Return a row's seconds per step with links of `bandwidth` bits per second."""
        exposed_s = exposed_seconds(self.plan(row.candidate.strategy, bandwidth), self.step_s)
        return row.prediction.step_s - row.prediction.exposed_s + exposed_s


@dataclass(frozen=True)
class AdviceRow:
    """A candidate with its prediction.

    Attributes:
        faster: plain allreduce's step over this one's.
        cost: the measured loss in per cent or accuracy in points, more being worse; infinite if not measured.
    """

    candidate: AdvisedStrategy
    prediction: Prediction
    faster: float
    cost: float


@dataclass(frozen=True)
class Advice:
    """The strategies compared in a situation, the fastest first.

    Attributes:
        situation: the situation.
        rows: a row for each candidate.
        plain: plain allreduce's row.
    """

    situation: TrainingSituation
    rows: tuple[AdviceRow, ...]
    plain: AdviceRow = field(init=False)

    @classmethod
    def of(cls, situation: TrainingSituation, candidates: Sequence[AdvisedStrategy]) -> Advice:
        """Predict all candidates, of which one is plain allreduce."""
        predictions = {each.name: situation.predict(each) for each in candidates}
        rows = (
            AdviceRow(
                each,
                predictions[each.name],
                predictions[PLAIN].step_s / predictions[each.name].step_s,
                _cost(each, situation.by_accuracy),
            )
            for each in candidates
        )
        return cls(situation, tuple(sorted(rows, key=lambda row: (row.prediction.step_s, row.cost))))

    def __post_init__(self) -> None:
        [plain] = (row for row in self.rows if row.candidate.name == PLAIN)
        object.__setattr__(self, "plain", plain)

    @property
    def best(self) -> AdviceRow:
        """The row of least measured cost among the fastest, as far as predictions can tell; else plain allreduce."""
        faster = [row for row in self.rows if row.faster > CLOSE and row.cost < math.inf]
        if not faster:
            return self.plain
        near = [row for row in faster if row.prediction.step_s <= ERROR * faster[0].prediction.step_s]
        return min(near, key=lambda row: (row.cost, row.prediction.step_s))

    def shown(self, most: int) -> list[AdviceRow]:
        """Return plain allreduce, the user's own strategies, and of each family the cheapest that is faster."""
        chosen = dict.fromkeys(row.candidate.name for row in self._by_worth())
        names = [*chosen][:most]
        return [row for row in self.rows if row.candidate.name in names]

    def least_bandwidth(self, row: AdviceRow) -> float | None:
        """Return the least of `BANDWIDTHS` from which plain allreduce is as fast as a row; None if it never is."""
        least = None
        for bandwidth in reversed(BANDWIDTHS):
            plain_s, row_s = (self.situation.step_seconds(each, bandwidth) for each in (self.plain, row))
            if plain_s > CLOSE * row_s:
                break
            least = bandwidth
        return least

    def _by_worth(self) -> Iterator[AdviceRow]:
        yield self.plain
        yield from (row for row in self.rows if row.candidate.is_own)
        yield self.best
        families: dict[str, AdviceRow] = {}
        for row in sorted(self.rows, key=lambda row: (row.cost, row.prediction.step_s)):
            if row.faster > CLOSE:
                families.setdefault(row.candidate.family, row)
        yield from sorted(families.values(), key=lambda row: row.prediction.step_s)


def _cost(candidate: AdvisedStrategy, by_accuracy: bool) -> float:
    if candidate.is_exact:
        return 0.0
    lost = candidate.accuracy_points if by_accuracy else candidate.loss_percent
    if lost is None:
        return math.inf
    return -lost if by_accuracy else lost
