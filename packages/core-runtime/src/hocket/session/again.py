"""Models that are attached again: what their sessions have counted so far, from which the next one goes on."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["Counted", "counted_before", "note_counted"]

#: Steps and passes over `session.data` that have ended.
Counted = tuple[int, int]

_counted: WeakKeyDictionary[nn.Module, Counted] = WeakKeyDictionary()


def counted_before(model: nn.Module) -> Counted:
    """Return what the model's earlier sessions have counted."""
    return _counted.get(model, (0, 0))


def note_counted(model: nn.Module, steps: int, passes: int) -> None:
    """Remember, as long as the model is there, what its session has counted."""
    _counted[model] = steps, passes
