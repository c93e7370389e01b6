"""The numbers of a row of metrics, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.results import TRAIN_LOSS

if TYPE_CHECKING:
    from hocket.session.session import Session
    from hocket.training.training_time import TrainingTime


@dataclass
class SinceRow:
    """The loss and samples of this rank since the last row of metrics.

    Attributes:
        loss: the sum of the samples' losses.
        samples: the number of samples.
        seconds: seconds of training up to the last row.
        waited_s: the part of these seconds in which this rank waited.
    """

    loss: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, loss: float, samples: int) -> None:
        """Add the mean loss of some samples."""
        self.loss += loss * samples
        self.samples += samples


def since_row_of_ranks(session: Session, time: TrainingTime, own: SinceRow) -> dict[str, float | None]:
    """Return a row's numbers over all ranks; collective.

    Seconds are those of the slowest rank; the training loss is a mean over samples, bytes and waits are means over
    ranks; the smallest and largest rank's stand beside them.
    """
    seconds, waited_s = time.seconds, time.waited_s
    passed_s = seconds - own.seconds
    share = (waited_s - own.waited_s) / passed_s if passed_s > 0 else None
    gathered = session.gather([seconds, own.loss, own.samples, session.counters.bytes_sent, waited_s, share])
    times, losses, samples, sent, waits, shares = zip(*gathered, strict=True)
    means = [loss / count for loss, count in zip(losses, samples, strict=True) if count]
    return {
        "seconds": max(times),
        **_spread(TRAIN_LOSS, means),
        TRAIN_LOSS: sum(losses) / max(1, sum(samples)),
        **_spread("bytes_sent", sent),
        "exposed_wait_s": sum(waits) / len(waits),
        **_spread("wait_share", [share for share in shares if share is not None]),
    }


def _spread(name: str, of_ranks: Sequence[float]) -> dict[str, float | None]:
    """Return the mean over ranks, the smallest and the largest; None for each if no rank has a value."""
    if not of_ranks:
        return dict.fromkeys((name, f"{name}_min", f"{name}_max"))
    return {
        name: sum(of_ranks) / len(of_ranks),
        f"{name}_min": min(of_ranks),
        f"{name}_max": max(of_ranks),
    }
