"""An optimizer's state of a parameter whose momentum a compressor keeps: what is read is what is used.

A compressor keeps a rank's share of the velocity, flat, in the dtype that travels. The optimizer's buffer is made of it
when somebody reads it, so that a program that never does pays nothing, and what is written there becomes the velocity
when gradients are sent next.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from hocket.session.torch_internals import storage_uses

BUFFER = "momentum_buffer"

# In place of a buffer that was not read yet.
_UNREAD = object()
# References to a buffer without other holders: the mapping's, a variable's, an argument's.
_BUFFER_REFERENCES = 3
# Uses of its memory: its own, and one of the question.
_OWN_USES = 2


class MomentumState(dict[str, Any]):
    """The state of one parameter, whose momentum buffer is this rank's velocity, scaled up to all ranks'.

    Args:
        parameter: the optimizer's.
        velocity: the compressor's memory of it, in the parameter's shape.
        scale: the rank's share of a mean, by which velocities are multiplied.
        given: the optimizer's state of the parameter; a buffer in it is not taken yet.
    """

    def __init__(self, parameter: Tensor, velocity: Tensor, scale: float, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._parameter, self._velocity, self._scale = parameter, velocity, scale
        #: The buffer's values when it was last made.
        self._made: Tensor | None = None
        super().setdefault(BUFFER, _UNREAD)

    def with_buffer(self, buffer: Tensor) -> dict[str, Any]:
        """Return a plain mapping with a buffer of these values: the one that was read, if one was."""
        read = super().get(BUFFER)
        if isinstance(read, Tensor) and read.shape == buffer.shape:
            buffer = read.copy_(buffer)
        return {**{key: self[key] for key in self if key != BUFFER}, BUFFER: buffer}

    def take(self) -> bool:
        """Set the velocity from writes to the buffer, to zeros if it was removed; return whether it changed.

        A buffer without other references is dropped.
        """
        if super().get(BUFFER) is _UNREAD:
            return False
        with torch.no_grad():
            return self._take_read()

    def _take_read(self) -> bool:
        value = super().get(BUFFER)
        if value is None:
            self._velocity.zero_()
            super().__setitem__(BUFFER, _UNREAD)
            self._made = None
            return True
        written = not self._is_as_made(value)
        if written:
            self._velocity.copy_(value).mul_(self._scale)
            self._made = value.clone()
        held = getrefcount(value) > _BUFFER_REFERENCES or storage_uses(value) > _OWN_USES
        if not held or value.shape != self._velocity.shape:
            super().__setitem__(BUFFER, _UNREAD)
            self._made = None
        return written

    def renew(self) -> None:
        """Let a buffer that was read hold the velocity of now, unless something has been written into it."""
        value = super().get(BUFFER)
        if isinstance(value, Tensor) and self._made is not None and self._is_as_made(value):
            with torch.no_grad():
                self._made.copy_(buffer_of(self._velocity, self._scale, self._parameter))
                value.copy_(self._made)

    def _is_as_made(self, value: Tensor) -> bool:
        # Not by its version, which `buffer.data.zero_()` leaves as it is.
        made = self._made
        return made is not None and value.dtype == made.dtype and torch.equal(value, made)

    def _read(self) -> None:
        """Make the buffer, or make it anew, for somebody who reads it."""
        if super().get(BUFFER) is _UNREAD:
            made = buffer_of(self._velocity, self._scale, self._parameter)
            self._made = made.clone()
            super().__setitem__(BUFFER, made)
        else:
            self.renew()

    def __getitem__(self, key: str) -> Any:
        if key == BUFFER:
            self._read()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if key != BUFFER or BUFFER not in self else self[key]

    def pop(self, key: str, *default: Any) -> Any:
        self._read()
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._read()
        return super().setdefault(key, default)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._read()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._read()
        return super().items()

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # defined, so that dict(state) and {**state} read by key

    def __repr__(self) -> str:
        return repr(self.copy())

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


def buffer_of(velocity: Tensor, scale: float, parameter: Tensor) -> Tensor:
    """Return a parameter's velocity as its optimizer would hold it: in its dtype and memory format, of all ranks."""
    value = (velocity / scale).to(parameter.device, parameter.dtype)
    return value.clone(memory_format=torch.preserve_format)
