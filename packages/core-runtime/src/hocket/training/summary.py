"""The content of a run's `summary.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hocket.plain import TreeView
from hocket.results import TRAIN_LOSS, VALID

if TYPE_CHECKING:
    from hocket.session.session import Session
    from hocket.training.meters import Value
    from hocket.training.run import RunConfig
    from hocket.training.training_time import TrainingTime

__all__ = ["summary_of"]

#: The number of ranks, from 0 on, whose replicas are evaluated one by one: a thousand take as long as the training.
_MOST_REPLICAS = 64


def summary_of(
    run: RunConfig,
    session: Session,
    time: TrainingTime,
    row: TreeView,
    evaluate_replica: Callable[[], Mapping[str, Value]],
) -> dict[str, object]:
    """Return the numbers of a whole run; collective.

    Args:
        run: the run's file.
        session: the session, after its last step.
        time: the counted time, paused.
        row: the last row of metrics.
        evaluate_replica: evaluates this rank's own replica; called where replicas differ.
    """
    seconds, counters = row["seconds"], session.counters
    gathered = session.gather([time.waited_s, counters.under_way_s, counters.bytes_sent])
    exposed_s, under_way_s, bytes_sent = (
        sum(of_rank) / session.size for of_rank in zip(*gathered, strict=True)
    )
    outcomes, active, staleness, skipped = zip(
        *session.gather([counters.outcomes, counters.active, counters.staleness_max, session.skipped_steps]),
        strict=True,
    )
    validated = {name: value for name, value in row.items() if name.startswith(VALID)}
    return {
        "recipe": run.strategy.name,
        "task": run.task.name,
        "transport": session.peer.transport,
        "ranks": session.size,
        "steps": session.step,
        # Ranks that step with gradients of their own leave out steps of their own.
        "skipped_steps": max(skipped),
        "skipped_steps_ranks": list(skipped),
        "seconds": seconds,
        "steps_per_second": session.step / seconds if seconds > 0 else None,
        TRAIN_LOSS: row[TRAIN_LOSS],
        **validated,
        **_of_replicas(session, validated, evaluate_replica),
        "bytes_sent_per_step": bytes_sent / max(1, session.step),
        "exposed_wait_fraction": exposed_s / seconds if seconds > 0 else None,
        "exposed_wait_fraction_ranks": [
            waited_s / seconds if seconds > 0 else None for waited_s, _, _ in gathered
        ],
        "overlap_share": 1 - exposed_s / under_way_s if under_way_s > 0 else None,
        "consensus_distance": row["consensus_distance"],
        "active_mean": sum(active) / sum(outcomes) if any(outcomes) else None,
        "staleness_max": max(staleness),
    }


def _of_replicas(
    session: Session, validated: Mapping[str, Value], evaluate_replica: Callable[[], Mapping[str, Value]]
) -> dict[str, list[Value]]:
    """Return the first replicas' own loss and metrics on all held-out samples, by rank; collective."""
    own = validated
    if session.rank >= _MOST_REPLICAS:
        own = {}
    elif not session.inner.replicas_equal:
        own = evaluate_replica()
    gathered = session.gather(own)
    return {f"{name}_ranks": [of_rank[name] for of_rank in gathered[:_MOST_REPLICAS]] for name in gathered[0]}
