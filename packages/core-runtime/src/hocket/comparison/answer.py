"""The beginning of a page: in words and bars, what a step took, and how much of it was waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from hocket.comparison.group import RunGroup
from hocket.comparison.record import Record
from hocket.quantities import format_bytes, format_seconds

#: The reason why a run has no steps per second.
UNTIMED = "no computing time was set (compute.step_s), so only messages take time on the virtual clock"


class _Step(NamedTuple):
    """The mean seconds of a group's steps."""

    label: str
    computing_s: float
    waiting_s: float

    @property
    def together_s(self) -> float:
        return self.computing_s + self.waiting_s


def answer(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield sentences on the time of a step: of one run its parts, of several the fastest against the first."""
    steps = [*_steps(groups)]
    if len(steps) < len(groups):
        untimed = [group.label for group in groups if not _is_timed(group)]
        if untimed:
            yield f"{', '.join(untimed)}: {UNTIMED}."
    if not steps:
        return
    fastest = min(steps, key=lambda step: step.together_s)
    if len(groups) == 1:
        share = fastest.waiting_s / fastest.together_s
        yield (
            f"A step took {format_seconds(fastest.together_s)}: {format_seconds(fastest.computing_s)} of computing and "
            f"{format_seconds(fastest.waiting_s)} ({share:.0%}) of waiting for other ranks."
        )
        sent = groups[0].spread(_bytes_per_step)
        if sent is not None and groups[0].records[0].ranks > 1:
            yield (
                f"Without the waits it would take {1 - share:.0%} of the time. A rank sent {format_bytes(sent.mean)} a "
                "step."
            )
    elif fastest is steps[0]:
        yield f"{fastest.label} took the shortest steps, {format_seconds(fastest.together_s)} each."
    else:
        times = steps[0].together_s / fastest.together_s
        yield (
            f"{fastest.label} took the shortest steps, {format_seconds(fastest.together_s)} each: {times:.1f} times as "
            f"fast as {steps[0].label}, {format_seconds(steps[0].together_s)}."
        )


def bars(groups: Sequence[RunGroup]) -> str:
    """Return computing against waiting in a step as HTML: a bar for each group; empty if none was timed."""
    steps = [*_steps(groups)]
    if not steps:
        return ""
    longest = max(step.together_s for step in steps)
    rows = "".join(
        f'<div class="bar"><b>{escape(step.label)}</b><span>'
        f'<i class="computing" style="width:{90 * step.computing_s / longest:.2f}%"></i>'
        f'<i class="waiting" style="width:{90 * step.waiting_s / longest:.2f}%"></i></span>'
        f"<em>{format_seconds(step.together_s)}</em></div>"
        for step in steps
    )
    legend = '<i class="computing"></i> computing <i class="waiting"></i> waiting for other ranks'
    return f'<div class="bars"><p class="legend">A step: {legend}</p>{rows}</div>'


def _steps(groups: Sequence[RunGroup]) -> Iterator[_Step]:
    for group in groups:
        taken, waited = group.spread(_seconds_per_step), group.spread(_wait_per_step)
        if _is_timed(group) and taken is not None and waited is not None and taken.mean > 0:
            yield _Step(group.label, max(0.0, taken.mean - waited.mean), min(waited.mean, taken.mean))


def _is_timed(group: RunGroup) -> bool:
    return all(record.is_timed for record in group.records)


def _seconds_per_step(record: Record) -> float | None:
    return record.seconds / record.steps if record.steps else None


def _wait_per_step(record: Record) -> float | None:
    waited = record.last("exposed_wait_s")
    return waited / record.steps if waited is not None and record.steps else None


def _bytes_per_step(record: Record) -> float | None:
    sent = record.last("bytes_sent")
    return sent / record.steps if sent is not None and record.steps else None
