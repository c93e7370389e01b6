"""Nested values, such as batches and activations, as messages between ranks: tensors, and the rest as JSON; no pickle.

A message cannot make the rank that receives it run any code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.arrays import Array
from hocket.checkpoint.tree import flatten, unflatten
from hocket.errors import UserError
from hocket.plain import Batch

_LENGTH_BYTES = 8

# Bytes to which each tensor's start is aligned, enough for every dtype.
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorForm:
    """The metadata of a tensor: name, dtype, shape and whether it requires gradients."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """The size of its data in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return an uninitialised tensor of this form, in host memory."""
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Form:
    """The form of a nested value: its structure, and its tensors' metadata.

    Attributes:
        structure: the value's structure as `hocket.checkpoint.tree` describes it, in JSON.
        tensors: the metadata of its tensors, in the order in which they travel.
    """

    structure: str
    tensors: tuple[TensorForm, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of one piece of memory for all of its tensors."""
        return sum(map(_padded, self.tensors))

    def views(self, memory: Array) -> list[Tensor]:
        """Return the tensors as views of memory, uint8 [nbytes]."""
        whole, views, start = torch.from_numpy(memory), [], 0
        for tensor in self.tensors:
            part = whole[start : start + tensor.nbytes]
            views.append(part.view(tensor.dtype).view(tensor.shape) if len(part) else tensor.empty())
            start += _padded(tensor)
        return views

    def filled(self, tensors: Sequence[Tensor]) -> Array:
        """Return memory with copies of tensors of this form, uint8 [nbytes]."""
        memory = np.zeros(self.nbytes, np.uint8)
        for view, tensor in zip(self.views(memory), tensors, strict=True):
            view.copy_(tensor.detach())
        return memory

    def value(self, memory: Array) -> Batch:
        """Return the value whose tensors lie in `filled` memory, in memory of its own."""
        return put_together(self, [view.clone() for view in self.views(memory)])

    def encode(self) -> bytes:
        """Return the form as a message."""
        tensors = [
            [t.name, str(t.dtype).removeprefix("torch."), list(t.shape), t.requires_grad]
            for t in self.tensors
        ]
        return json.dumps([self.structure, tensors]).encode()

    @classmethod
    def decode(cls, message: bytes) -> Form:
        """Return the form that was encoded."""
        structure, tensors = json.loads(message)
        return cls(
            structure,
            tuple(
                TensorForm(name, _dtype(dtype), tuple(shape), grad) for name, dtype, shape, grad in tensors
            ),
        )


def take_apart(value: object) -> tuple[Form, list[Tensor]]:
    """Return a value's form and its tensors, of any shape and dtype, which are not copied.

    Raises:
        UserError: it holds something that would come back as another type; names its place.
    """
    structure, tensors = flatten(value, exactly=True)
    forms = tuple(TensorForm(name, t.dtype, tuple(t.shape), t.requires_grad) for name, t in tensors.items())
    return Form(json.dumps(structure), forms), list(tensors.values())


def put_together(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Return the value of a form with the given tensors, which require gradients if the sender's did."""
    named = {
        of_tensor.name: tensor.requires_grad_(of_tensor.requires_grad)
        for of_tensor, tensor in zip(form.tensors, tensors, strict=True)
    }
    return unflatten(json.loads(form.structure), named.__getitem__)


def as_bytes(tensor: Tensor) -> Array:
    """Return a tensor's data as uint8 [nbytes]: its own memory if that is contiguous host memory, else a copy."""
    data: Array = (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    )
    return data


def pack(value: object) -> bytes:
    """Return a value as one message.

    Raises:
        UserError: it holds something that would come back as another type; names its place.
    """
    form, tensors = take_apart(value)
    head = form.encode()
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, form.filled(tensors).data])


def unpack(message: bytes) -> Any:
    """Return the value that was packed, its tensors in host memory of their own."""
    start = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    form = Form.decode(message[_LENGTH_BYTES:start])
    return form.value(np.frombuffer(bytearray(message[start:]), np.uint8))


def _padded(tensor: TensorForm) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"another rank sent a tensor of dtype {name}, which this version of torch lacks: install the same torch "
            "on all ranks"
        )
    return dtype
