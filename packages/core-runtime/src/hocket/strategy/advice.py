"""Warnings about strategies that are allowed: what a run never reaches, outer steps that overshoot, longer dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hocket.errors import some
from hocket.outer.sgd import Sgd
from hocket.strategy.exchange import Every
from hocket.strategy.strategy import Phase, Strategy

# Lost last steps are reported from this share of all steps on: a few steps are lost wherever training ends.
_MUCH = 0.1
_LONGER = "raise steps or epochs"

# Outer steps with so much momentum, in shorter periods than this, overshoot from the first step on.
_STRONG_MOMENTUM = 0.9
_SHORT_PERIOD = 30


def unreached(strategy: Strategy, steps: int, ranks: int) -> Iterator[str]:
    """Yield a sentence on each phase that never begins, each exchange that never happens, and lost steps.

    Args:
        strategy: from step 0 on.
        steps: number of steps of the training, 1 or more.
        ranks: number of ranks.
    """
    phases = (Phase(0, strategy), *strategy.phases)
    ends = [*(phase.step for phase in strategy.phases), steps]
    for phase, following in zip(phases, ends, strict=True):
        place = "" if phase is phases[0] else f"phases.{phase.step}"
        if phase.step >= steps:
            yield f"{place} is never reached: training ends after step {steps}. Begin it earlier, or {_LONGER}"
            continue
        end = min(following, steps)
        for exchange in phase.strategy.parameters if end > phase.step else ():
            if isinstance(exchange.every, Every) or not exchange.takes_place(ranks):
                continue
            name = f"{place}.{exchange.name}" if place else exchange.name
            lost = exchange.since_due(end, ranks)  # steps since all segments were sent
            if end - lost <= phase.step:
                what = "training" if end == steps else "the phase"
                yield (
                    f"{name} never takes place: it is due every {exchange.every} steps, but {what} ends after step "
                    f"{end}. Lower `every`, or {_LONGER}"
                )
            elif exchange.outer and end == steps and lost > _MUCH * steps and not exchange.stagger:
                yield (
                    f"{name} steps outer parameters every {exchange.every} steps: the evaluated and saved model "
                    f"lacks the last {lost} of {steps} steps. End after step {end - lost}, or lower `every`"
                )


def overshooting(strategy: Strategy) -> Iterator[str]:
    """Yield a sentence on each exchange whose outer steps overshoot from step 0 on.

    Args:
        strategy: from step 0 on.
    """
    for exchange in strategy.at(0).parameters:
        strong = isinstance(exchange.outer, Sgd) and exchange.outer.momentum >= _STRONG_MOMENTUM
        if strong and not isinstance(exchange.every, Every) and exchange.every < _SHORT_PERIOD:
            assert isinstance(exchange.outer, Sgd)
            yield (
                f"{exchange.name} steps outer parameters every {exchange.every} steps with momentum "
                f"{exchange.outer.momentum:g} from the first step on: this overshoots. The first outer steps go the "
                "same way, and momentum adds them up. Begin with synchronous_steps, about a quarter of the run, lower "
                f"{exchange.name}.outer.momentum, or set {exchange.name}.every to {_SHORT_PERIOD} or more"
            )


def widened(strategy: Strategy, dtypes: Collection[str]) -> str:
    """Return a sentence on parameters that travel in a longer dtype than their own; empty if none do.

    Args:
        strategy: from step 0 on.
        dtypes: names of the trainable parameters' dtypes, such as bfloat16.
    """
    short = sorted({"bfloat16", "float16"} & {*dtypes})
    whole = [each.name for part in strategy.in_turn for each in part.exchanges if each.compressor is None]
    if not short or not whole:
        return ""
    return (
        f"parameters are {' and '.join(short)}: {some([*dict.fromkeys(whole)])} sends and sums them as float32, in "
        "twice their bytes, so that sums are not rounded"
    )


def outer_age(strategy: Strategy, step: int, ranks: int) -> str:
    """Return a sentence on outer parameters that are older than the step at which they are evaluated; else empty.

    Args:
        strategy: the strategy in force, without phases.
        step: number of steps so far.
        ranks: number of ranks.
    """
    for exchange in strategy.parameters:
        age = exchange.since_due(step, ranks)
        if exchange.outer is not None and age and not exchange.stagger and exchange.takes_place(ranks):
            period = exchange.period(ranks)
            return (
                f"consensus at step {step}: the model holds the outer parameters of step "
                f"{max(0, step - age)}, without the {min(age, step)} steps of training since. Evaluate "
                f"after a multiple of {period} steps to include them"
            )
    return ""
