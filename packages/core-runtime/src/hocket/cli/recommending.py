"""`hocket recommend`: the strategies to try first, by predicted step and measured cost; no rank is started."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import click

from hocket.cli.advice_text import as_json, show_advice, show_explanation
from hocket.cli.network_options import network_overrides
from hocket.cli.rank_options import island_overrides
from hocket.cli.situation import Asked, late_override
from hocket.plan.advice import Advice
from hocket.plugin import default_registry
from hocket.plugin.discovery import KNOWN_WORDS, TASKS
from hocket.quantities import read, seconds


def recommend_command(
    words: Sequence[str],
    ranks: str | None,
    params: str | None,
    model: str | None,
    bandwidth: str | None,
    latency: str | None,
    hosts: str | None,
    island: int | None,
    step: str | None,
    late: str | None,
    optimizer: str | None,
    *,
    measure: bool,
    everything: bool,
    explain: bool,
    in_json: bool,
) -> None:
    """Carry out `hocket recommend`.

    Args:
        words: a recipe, or a run's file or folder, and overrides; the others are the options.

    Raises:
        UserError, click.UsageError: a wrong argument or option.
    """
    if ranks is not None:
        raise click.UsageError(
            f"-n: name the ranks' hosts instead: --hosts {ranks}x1 for {ranks} hosts of one rank, --hosts 1x{ranks} "
            "for one host"
        )
    targets = [word for word in words if "=" not in word or os.path.exists(word)]
    if len(targets) > 1:
        raise click.UsageError(f"Got {len(targets)} runs: name one, or none.")
    overrides = [word for word in words if word not in targets]
    overrides += [*network_overrides(bandwidth, latency), *island_overrides(island)]
    overrides += [] if optimizer is None else [f"optimizer={optimizer}"]
    overrides += [] if step is None else [f"compute.step_s={read('--step', seconds, step)!r}"]
    overrides += [] if late is None else [late_override(late)]
    registry = default_registry()
    target = targets[0] if targets else None
    asked = Asked(registry, target, overrides, params, measure=measure, everything=everything)
    situation = asked.situation(model, hosts)
    strategies, left = asked.strategies(situation)
    by_accuracy = asked.names("optimizer") and asked.base.optimizer.class_name == "sgd"
    advice = Advice(situation, strategies, by_accuracy, measure)
    if in_json:
        print(json.dumps(as_json(advice, left), indent=1))
        return
    rows = advice.rows if everything else advice.shown()
    absent = [f"hocket-{word}" for word in KNOWN_WORDS if word not in (TASKS, *registry.installed())]
    show_advice(advice, rows, len(absent))
    if explain:
        show_explanation(advice, rows, left | dict.fromkeys(absent, "not installed"))
