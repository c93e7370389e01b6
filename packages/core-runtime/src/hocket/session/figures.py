"""The figures of a session over all of its ranks: steps, seconds, bytes and waits."""

from __future__ import annotations

from hocket.session.engine_session import EngineSession
from hocket.strategy.advice import unreached


def figures_of(
    session: EngineSession,
    seconds: float,
    waited_s: float,
    *,
    first_step: int = 0,
    sent_before: float = 0,
    call: str = "session.gather",
) -> dict[str, object]:
    """Return the figures of a session, as a run's summary has them; collective.

    Args:
        session: the session, after its last step.
        seconds: the seconds of training of the slowest rank.
        waited_s: the part of this rank's seconds in which it waited for an exchange.
        first_step: the number of steps before these seconds.
        sent_before: the bytes that this rank has sent in those steps.
        call: the call that asks for them, for messages about ranks that make another.
    """
    counters = session.counters
    waits, under_way, sent, outcomes, active, staleness, skipped = zip(
        *session.gathered(
            [
                waited_s,
                counters.under_way_s,
                counters.bytes_sent - sent_before,
                counters.outcomes,
                counters.active,
                counters.staleness_max,
                session.skipped_steps,
            ],
            call,
        ),
        strict=True,
    )
    exposed_s, under_way_s, bytes_sent = (sum(each) / session.size for each in (waits, under_way, sent))
    return {
        "recipe": session.strategy.name,
        "transport": session.peer.transport,
        "ranks": session.size,
        **({"islands": session.num_replicas} if session.island.places else {}),
        "steps": session.step,
        # Ranks that step with gradients of their own leave out steps of their own.
        "skipped_steps": max(skipped),
        "skipped_steps_ranks": list(skipped),
        "seconds": seconds,
        "steps_per_second": (session.step - first_step) / seconds if seconds > 0 else None,
        "bytes_sent_per_step": bytes_sent / max(1, session.step - first_step),
        "exposed_wait_fraction": exposed_s / seconds if seconds > 0 else None,
        "exposed_wait_fraction_ranks": [each / seconds if seconds > 0 else None for each in waits],
        "overlap_share": 1 - exposed_s / under_way_s if under_way_s > 0 else None,
        "active_mean": sum(active) / sum(outcomes) if any(outcomes) else None,
        "staleness_max": max(staleness),
        "warnings": [*unreached(session.strategy, session.step, session.num_replicas)]
        if session.step
        else [],
    }
