"""The phases of a run's file: from which step on which overrides of the strategy hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hocket.config.document import Document, Location, Origin
from hocket.config.source import SLOTS


def phase_documents(document: Document) -> Iterator[tuple[int, Document]]:
    """Yield for each phase, in order, its first step and the whole document as it is then.

    Args:
        document: interpolated. Below `phases` stand overrides by step, as `gradients.0.compressor: none` or nested.

    Raises:
        ConfigError: a step that is no whole number, or an override that leads nowhere or out of the strategy.
    """
    phases = document.root.child("phases")
    if phases.value is None:
        return
    if not isinstance(phases.value, Mapping):
        raise phases.error(
            f"got {phases.given}", "overrides by step, such as {500: {gradients.0.overlap: none}}"
        )
    for key in phases.value:
        if not key.isdecimal():
            raise phases.child(key).error(
                f"{key!r} is not a number of steps", "whole numbers from 0, such as {500: {...}}"
            )
    changed = document
    for key in sorted(phases.value, key=int):
        phase = phases.child(key)
        if not isinstance(phase.value, Mapping):
            raise phase.error(f"got {phase.given}", "overrides, such as {gradients.0.overlap: none}")
        changed = changed.copy()
        origin = Origin(f"{document.origin_of(phase.path).label}: phases.{key}", bare=True)
        for place, value in phase.value.items():
            _override(changed, phase.child(place), place, value, origin)
        yield int(key), changed


def _override(document: Document, where: Location, place: str, value: object, origin: Origin) -> None:
    keys = place.split(".")
    if keys[0] == "strategy":
        keys = keys[1:]
    if not keys or keys[0] not in SLOTS:
        raise where.error("not a part of a strategy", ", ".join(SLOTS))
    if keys[0] == "samples":
        raise where.error("the exchange of samples cannot change during a run", "gradients, parameters")
    document.assign(("strategy", *keys), value, origin)
