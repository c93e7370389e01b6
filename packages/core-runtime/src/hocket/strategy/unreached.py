"""What of a strategy has no effect, as training ends before it."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.strategy.exchange import Every
from hocket.strategy.strategy import Strategy

__all__ = ["unreached"]

# The last steps' work is told of from this share of all steps on: a few steps are lost wherever training ends.
_MUCH = 0.1


def unreached(strategy: Strategy, steps: int, ranks: int) -> Iterator[str]:
    """Yield a sentence on each phase that never begins, each exchange that never takes place, and on lost steps.

    Args:
        strategy: from step 0 on.
        steps: after how many training ends, 1 or more.
        ranks: how many train.
    """
    starts = [0, *(phase.step for phase in strategy.phases)]
    places = ["", *(f"phases.{phase.step}." for phase in strategy.phases)]
    for place, start, following, held in zip(
        places, starts, [*starts[1:], steps], strategy.in_turn, strict=True
    ):
        if start >= steps:
            yield (
                f"{place[:-1]} is never reached: training ends after step {steps}. Let it begin earlier, or raise "
                "steps or epochs"
            )
            continue
        end = min(following, steps)
        for exchange in held.parameters:
            if isinstance(exchange.every, Every) or not exchange.takes_place(ranks):
                continue
            lost = (end - exchange.offset) % exchange.every  # steps since all segments were sent
            name, what = f"{place}{exchange.name}", "training" if end == steps else "the phase"
            if end - lost <= start:
                yield (
                    f"{name} is due every {exchange.every} steps, and never is: {what} ends after step {end}. Lower "
                    "`every`, or raise steps or epochs"
                )
            elif (
                exchange.outer is not None and end == steps and lost > _MUCH * steps and not exchange.stagger
            ):
                yield (
                    f"{name} steps outer parameters every {exchange.every} steps: what ranks learn in the last {lost} "
                    f"of {steps} steps is not in the model that is evaluated and saved. End after step {end - lost}, "
                    "or lower `every`"
                )
