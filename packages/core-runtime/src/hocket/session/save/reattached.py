"""The counts of models that are attached again: their next session continues from them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

#: Steps and passes over `session.data` that have ended.
Counted = tuple[int, int]

_counted: WeakKeyDictionary[nn.Module, Counted] = WeakKeyDictionary()


def counted_before(model: nn.Module) -> Counted:
    """Return the counts of the model's earlier sessions."""
    return _counted.get(model, (0, 0))


def note_counted(model: nn.Module, steps: int, passes: int) -> None:
    """Save the counts of a model's session, for as long as the model exists."""
    _counted[model] = steps, passes
