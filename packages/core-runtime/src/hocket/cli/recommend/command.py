"""`hocket recommend`: strategies ranked by predicted step time; no rank is started."""

from __future__ import annotations

from hocket.cli.printing import say
from hocket.cli.recommend.candidates import find_candidates
from hocket.cli.recommend.options import Asked
from hocket.cli.recommend.predictions import Predictions
from hocket.cli.recommend.showing import absent, assumptions, show_costs, show_head, show_table_of
from hocket.cli.recommend.situation import (
    base_of,
    delays_among,
    model_asked,
    placement_of,
    step_seconds,
    with_script,
)
from hocket.errors import UserError
from hocket.plugin import default_registry

__all__ = ["recommend_command"]


def recommend_command(asked: Asked) -> None:
    """Carry out `hocket recommend`.

    Raises:
        UserError: a wrong argument or option.
    """
    registry = default_registry()
    asked = with_script(asked)
    if asked.of_strategy and asked.target is None:
        raise UserError(
            f"{asked.of_strategy[0]} changes one strategy: name it, such as `hocket recommend diloco "
            "parameters.0.every=30`, or a file"
        )
    base = base_of(asked, registry)
    placement = placement_of(asked, base)
    model = model_asked(asked, base)
    step_s = step_seconds(asked, base)
    delays = delays_among(base, placement)
    candidates, refused = find_candidates(asked, base, registry, placement, model)

    from hocket.plan.plan import plan

    packing: dict[str, float] = {}
    if asked.measure:
        from hocket.plan.packing_time import packing_seconds

        packing = {
            name: packing_seconds(plan(strategy, model, placement, base.network))
            for each in candidates
            for name, strategy in each.strategies.items()
        }
    show_head(base, placement, plan(base.strategy, model, placement, base.network), step_s, delays)
    predictions = Predictions(candidates, model, base, step_s, delays, packing)
    shown = show_table_of(
        predictions, placement, base.network.bandwidth_bits_per_s, delays, packing=asked.measure
    )
    show_costs(shown)
    if refused:
        print("\nLeft out here:")
        say([f"{name}: {why}" for name, why in refused])
    print()
    say([*absent(registry.installed()), *assumptions(asked, placement, delays, shown)])
