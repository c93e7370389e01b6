"""Advice on strategies: the step that each is predicted to take, its measured cost, and the one to try first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from hocket.config.settings import RunSettings
from hocket.plan.plan import Plan
from hocket.plan.situation import TrainingSituation
from hocket.plan.utilisation import BANDWIDTHS, exposed_seconds
from hocket.strategy.strategy import Strategy

#: The recipe that changes nothing and sends while backward goes on, as DDP does.
PLAIN = "agd"

#: What takes no longer than this many times another is as fast.
CLOSE = 1.05

#: The factor by which predictions differ from measurements on four hosts, but for `eager.solo` (docs/choosing.md).
ERROR = 1.3

#: The rows of a short answer.
ROWS = 5

#: The settings of no recipe, for strategies of which nothing was measured.
UNMEASURED = RunSettings()


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
    """A strategy to compare, with its prediction.

    Attributes:
        name: the recipe's name with its changed settings, or the file's.
        spelled: the strategy as `hocket sweep strategy=...` takes it.
        strategy: without phases.
        prediction: of its step.
        about: the settings of the recipe whose measured costs it has; `UNMEASURED` if none were measured.
        is_own: True if the user named it.
    """

    name: str
    spelled: str
    strategy: Strategy
    prediction: Prediction
    about: RunSettings = UNMEASURED
    is_own: bool = False


def is_exact(recipe: RunSettings) -> bool:
    """Return whether a recipe's step is known to give the mean of all gradients."""
    return recipe.changes.startswith("nothing")


def measured_cost(recipe: RunSettings, by_accuracy: bool) -> float:
    """Return a recipe's loss in per cent or accuracy in points, more being worse; infinite if not measured."""
    if is_exact(recipe):
        return 0.0
    lost = recipe.accuracy_points if by_accuracy else recipe.loss_percent
    if lost is None:
        return math.inf
    return -lost if by_accuracy else lost


def is_measured(recipe: RunSettings) -> bool:
    """Return whether a recipe's loss or accuracy was measured, or is that of the mean of all gradients."""
    return min(measured_cost(recipe, by_accuracy) for by_accuracy in (True, False)) < math.inf


@dataclass(frozen=True)
class Advice:
    """The strategies compared in a situation.

    Attributes:
        situation: the situation.
        rows: the strategies, the fastest first; one of them is plain allreduce.
        by_accuracy: compare measured costs by the accuracy of SGD, in place of the loss of AdamW.
    """

    situation: TrainingSituation
    rows: Sequence[AdvisedStrategy]
    by_accuracy: bool = False

    @property
    def on_one_host(self) -> bool:
        """True if messages pass through a host's memory alone."""
        return len({*self.situation.placement.hosts}) == 1

    @property
    def plain(self) -> AdvisedStrategy:
        """Plain allreduce."""
        return next(row for row in self.rows if row.name == PLAIN)

    def faster(self, row: AdvisedStrategy) -> float:
        """Return plain allreduce's step over this one's."""
        return self.plain.prediction.step_s / row.prediction.step_s

    @property
    def best(self) -> AdvisedStrategy:
        """The row of least measured cost among the fastest, as far as predictions can tell; else plain allreduce."""
        faster = [row for row in self._cheapest_first() if self._cost(row) < math.inf]
        limit_s = ERROR * min((row.prediction.step_s for row in faster), default=0.0)
        return next((row for row in faster if row.prediction.step_s <= limit_s), self.plain)

    def shown(self, most: int = ROWS) -> list[AdvisedStrategy]:
        """Return plain allreduce, the user's own strategies, and of each family the cheapest that is faster."""
        # A family is a plugin, or a recipe of core.
        families = {re.split("[., ]", row.name)[0]: row for row in reversed(self._cheapest_first())}
        own = [row for row in self.rows if row.is_own]
        cheapest = [row for row in self.rows if row in families.values()]
        chosen = [self.plain, self.best, *own, *cheapest]
        return [row for row in self.rows if row.name in [*dict.fromkeys(each.name for each in chosen)][:most]]

    def _cost(self, row: AdvisedStrategy) -> float:
        return measured_cost(row.about, self.by_accuracy)

    def _cheapest_first(self) -> list[AdvisedStrategy]:
        """Return the strategies that are faster than plain allreduce, and of equal cost the fastest first."""
        faster = (row for row in self.rows if self.faster(row) > CLOSE)
        return sorted(faster, key=self._cost)

    def least_bandwidth(self, row: AdvisedStrategy) -> float | None:
        """Return the least of `BANDWIDTHS` from which plain allreduce is as fast as a row; None if it never is."""

        def step_s(each: AdvisedStrategy, bandwidth: float) -> float:
            plan, costs = self.situation.plan(each.strategy, bandwidth), each.prediction
            computing_s = self.situation.settings.compute.step_s
            return costs.step_s - costs.exposed_s + exposed_seconds(plan, computing_s)

        def is_level(bandwidth: float) -> bool:
            return step_s(self.plain, bandwidth) <= CLOSE * step_s(row, bandwidth)

        return min(takewhile(is_level, reversed(BANDWIDTHS)), default=None)
