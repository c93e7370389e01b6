"""Advice on strategies: the step that each is predicted to take, its measured cost, and the one to try first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

#: What sgd loses with half its steps, and what replicas lose that exchange nothing: per cent of loss (docs/atlas).
LOSS_OF_HALF, LOSS_ALONE = 11.6, 14.0

#: The same in points of accuracy.
POINTS_OF_HALF, POINTS_ALONE = 2.4, 11.7

#: The rule by which a strategy is marked.
CHOICE = (
    f"* marks the strategy with the shortest step, its cost included: {LOSS_OF_HALF} % of loss, or "
    f"{POINTS_OF_HALF} points of accuracy, double the step, as sgd loses this with half its steps. A strategy that "
    f"loses more than replicas without any exchange ({LOSS_ALONE} %, {POINTS_ALONE} points) is not marked."
)

#: The settings of no recipe, for strategies of which nothing was measured.
UNMEASURED = RunSettings()


@dataclass(frozen=True)
class Prediction:
    """The predicted costs of a strategy.

    Attributes:
        step_s: seconds of a step, on average.
        exposed_s: of these, seconds that a rank waits for messages.
        held_up_s: of these, seconds that late ranks hold it up, itself included.
        bytes_per_step: bytes that a rank sends, on average.
        memory_bytes: bytes of the exchanges' buffers on a rank.
    """

    step_s: float
    exposed_s: float
    held_up_s: float
    bytes_per_step: float
    memory_bytes: int


def predict(plan: Plan, step_s: float, held_up_s: float = 0.0) -> Prediction:
    """Predict a strategy's step; compressing takes no time.

    Args:
        plan: of its exchanges.
        step_s: seconds of computing in a step.
        held_up_s: of `held_up_seconds`; 0 if no rank is late.
    """
    exposed_s = exposed_seconds(plan, step_s)
    together_s = step_s + exposed_s + held_up_s
    return Prediction(together_s, exposed_s, held_up_s, plan.bytes_per_step, plan.memory_bytes)


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


@dataclass(frozen=True)
class Advice:
    """The strategies compared in a situation.

    Attributes:
        situation: the situation.
        rows: the strategies, the fastest first; one of them is plain allreduce.
        by_accuracy: compare measured costs by the accuracy of SGD, in place of the loss of AdamW.
        left_out: reasons by the names of recipes that are left out, and of packages.
    """

    situation: TrainingSituation
    rows: Sequence[AdvisedStrategy]
    by_accuracy: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def plain(self) -> AdvisedStrategy:
        """Plain allreduce."""
        return next(row for row in self.rows if row.name == PLAIN)

    def faster(self, row: AdvisedStrategy) -> float:
        """Return plain allreduce's step over this one's."""
        return self.plain.prediction.step_s / row.prediction.step_s

    @property
    def best(self) -> AdvisedStrategy:
        """The strategy to try first; it may be plain allreduce."""
        return self._best_first()[0]

    def _best_first(self) -> list[AdvisedStrategy]:
        """Return plain allreduce and what is faster, by step and measured cost; unmeasured ones by step alone."""
        faster = (row for row in self.rows if self.faster(row) > CLOSE)
        return sorted([self.plain, *faster], key=self._worth_s)

    def shown(self, most: int = 5) -> list[AdvisedStrategy]:
        """Return plain allreduce, the user's own strategies, and of each family the best that is faster."""
        # A family is a plugin, or a recipe of core.
        families = {re.split("[., ]", row.name)[0]: row for row in reversed(self._best_first())}
        own = (row for row in self.rows if row.is_own)
        others = (row for row in self.rows if row in families.values())
        names = dict.fromkeys(row.name for row in (self.plain, self.best, *own, *others))
        return [row for row in self.rows if row.name in [*names][:most]]

    def _worth_s(self, row: AdvisedStrategy) -> float:
        """Return the seconds of a step, doubled for what half the steps would cost; infinite if nothing is gained."""
        if is_exact(row.about):
            return row.prediction.step_s
        lost, half, alone = row.about.loss_percent, LOSS_OF_HALF, LOSS_ALONE
        if self.by_accuracy:
            lost, half, alone = row.about.accuracy_points, -POINTS_OF_HALF, -POINTS_ALONE
        if lost is None or lost / alone > 1:
            return math.inf
        return row.prediction.step_s * math.pow(2.0, lost / half)

    def least_bandwidth(self, row: AdvisedStrategy) -> float | None:
        """Return the least of `BANDWIDTHS` from which plain allreduce is as fast as a row; None if it never is."""

        def step_s(each: AdvisedStrategy, bandwidth: float) -> float:
            plan = self.situation.plan(each.strategy, bandwidth)
            return predict(plan, self.situation.settings.compute.step_s, each.prediction.held_up_s).step_s

        def is_level(bandwidth: float) -> bool:
            return step_s(self.plain, bandwidth) <= CLOSE * step_s(row, bandwidth)

        return min(takewhile(is_level, reversed(BANDWIDTHS)), default=None)
