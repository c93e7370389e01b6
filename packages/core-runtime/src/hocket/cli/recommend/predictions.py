"""Predictions for strategies: here, on other networks, and among other numbers of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hocket.cli.recommend.candidates import CandidateStrategy
from hocket.errors import HocketError
from hocket.plan.advice import CLOSE, PLAIN, Prediction, predict
from hocket.strategy.compose import SYNCHRONOUS_RECIPE
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays
    from hocket.plan.plan import Plan

__all__ = ["Predictions"]


class Predictions:
    """The predictions for candidates, in this situation and in others; each is computed once.

    Args:
        candidates: the strategies to compare.
        model: a model with as many parameters as the user's.
        base: the run whose network and seed count for all.
        step_s: seconds that a step computes.
        delays: the delays of late ranks; None for none.
        packing: seconds of a step that compressors compute, by strategy; empty if not measured.
    """

    def __init__(
        self,
        candidates: Sequence[CandidateStrategy],
        model: nn.Module,
        base: RunConfig,
        step_s: float,
        delays: Delays | None,
        packing: Mapping[str, float],
    ) -> None:
        self.candidates = {each.name: each for each in candidates}
        self._strategies = {
            name: strategy for each in candidates for name, strategy in each.strategies.items()
        }
        self._model, self._base, self._step_s, self._delays = model, base, step_s, delays
        self._packing = packing
        self._found: dict[tuple[str, Placement, float], Prediction | None] = {}
        self._held_up: dict[tuple[str, Placement], float] = {}

    def of(self, name: str, where: Placement, bandwidth: float) -> Prediction | None:
        """Return the prediction for links of `bandwidth` bits per second, or None if the ranks cannot use it."""
        key = (name, where, bandwidth)
        if key not in self._found:
            self._found[key] = self._predict(*key)
        return self._found[key]

    def as_tested(self, name: str, where: Placement, bandwidth: float) -> float | None:
        """Return a run's mean seconds per step, with the first steps of its file or of the accuracy's test.

        None if the ranks cannot use one of the strategies.
        """
        candidate = self.candidates[name]
        begun = [(fraction, candidate.of_start(place)) for place, (fraction, _) in enumerate(candidate.start)]
        if not begun and candidate.synchronous_fraction:
            begun = [(candidate.synchronous_fraction, SYNCHRONOUS_RECIPE)]
        own = self.of(name, where, bandwidth)
        if own is None:
            return None
        average = own.step_s
        for fraction, other in begun:
            before = self.of(other, where, bandwidth)
            if before is None:
                return None
            average += fraction * (before.step_s - own.step_s)
        return average

    def is_level(self, name: str, where: Placement, bandwidth: float) -> bool:
        """Return whether plain allreduce takes at most `CLOSE` times as long, at `bandwidth` bits per second."""
        plain, other = (self.as_tested(each, where, bandwidth) for each in (PLAIN, name))
        return plain is not None and other is not None and plain <= CLOSE * other

    def _predict(self, name: str, where: Placement, bandwidth: float) -> Prediction | None:
        from hocket.plan.plan import plan

        network = replace(self._base.network, bandwidth_bits_per_s=bandwidth)
        try:
            costs = plan(self._strategies[name], self._model, where, network)
        except HocketError:
            return None
        held_up_s = self._held_up_seconds(name, where, costs)
        return predict(costs, self._step_s, held_up_s, self._packing.get(name, 0.0))

    def _held_up_seconds(self, name: str, where: Placement, costs: Plan) -> float:
        """Return a step's seconds lost to late ranks; independent of bandwidth, so cached across bandwidths."""
        from hocket.plan.lateness import held_up_seconds

        if self._delays is None:
            return 0.0
        if (name, where) not in self._held_up:
            self._held_up[name, where] = held_up_seconds(costs, self._step_s, self._delays, self._base.seed)
        return self._held_up[name, where]
