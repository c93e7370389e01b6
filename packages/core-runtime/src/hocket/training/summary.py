"""The content of a run's `summary.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hocket.plain import TreeView
from hocket.results import TRAIN_LOSS, VALID
from hocket.session.figures import figures_of

if TYPE_CHECKING:
    from hocket.session.session import Session
    from hocket.training.meters import Value
    from hocket.training.run import RunConfig
    from hocket.training.training_time import TrainingTime

#: The number of replicas, from 0 on, that are evaluated one by one: a thousand take as long as the training.
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
    validated = {name: value for name, value in row.items() if name.startswith(VALID)}
    return {
        **figures_of(session.inner, row["seconds"], time.waited_s),
        "task": run.task.name,
        TRAIN_LOSS: row[TRAIN_LOSS],
        **validated,
        **_of_replicas(session, validated, evaluate_replica),
        "consensus_distance": row["consensus_distance"],
    }


def _of_replicas(
    session: Session, validated: Mapping[str, Value], evaluate_replica: Callable[[], Mapping[str, Value]]
) -> dict[str, list[Value]]:
    """Return the first replicas' own loss and metrics on all held-out samples, by rank or island; collective."""
    island = session.inner.island
    own = validated
    if island.column.rank >= _MOST_REPLICAS:
        own = {}
    elif not session.inner.replicas_equal:
        own = evaluate_replica()
    places = island.places or [0] * session.size
    found = [of_rank for of_rank, place in zip(session.gather(own), places, strict=True) if place == 0]
    return {f"{name}_ranks": [of_one[name] for of_one in found[:_MOST_REPLICAS]] for name in found[0]}
