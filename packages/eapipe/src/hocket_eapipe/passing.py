"""What stages hand over to each other: nested values with tensors, as messages and within a process.

A value is a tensor, or tuples, lists and dictionaries of tensors and of anything that can be pickled, in any nesting;
form, dtypes and shapes may change from batch to batch. As a message it is the length of its form (0 where that is
what it was last time), its form, and each tensor that has elements, from where it lies. All of them have the same round
on one lane, on which messages between two ranks keep their order.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hocket.session.exchanging import Counters
from hocket.transport.peer import Array, Lane, Request

__all__ = ["MessageReceiver", "MessageSender", "detached"]


@dataclass(frozen=True)
class _Form:
    """What stands in a tensor's place in the form of a value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


def detached(value: Any) -> Any:
    """Return a value without graphs, in the same memory; what required gradients is a leaf that does."""
    return tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), value)


class MessageSender:
    """Sends values to one rank.

    Args:
        lane: between the ranks of a pipeline.
        to: the rank on it.
        counters: count what is sent.
    """

    def __init__(self, lane: Lane, to: int, counters: Counters) -> None:
        self._lane = lane
        self._counters = counters
        self._to = to
        self._form = b""
        #: What is on its way, with its memory.
        self._sending: deque[tuple[Request, Array]] = deque()

    def send(self, value: Any, round: int) -> None:
        """Send a value; its tensors must not be written before they have arrived."""
        leaves, structure = tree_flatten(value)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        form = pickle.dumps(tree_unflatten([_described(leaf) for leaf in leaves], structure))
        is_new = form != self._form
        self._form = form
        header = np.array([len(form) if is_new else 0], dtype=np.int64)
        self._isend(header, round)
        if is_new:
            self._isend(np.frombuffer(form, dtype=np.uint8), round)
        for tensor in tensors:
            if tensor.numel():
                self._isend(_as_bytes(tensor.cpu().contiguous()), round)
        self.release()

    def release(self) -> None:
        """Let go of the memory of what has left; never blocks."""
        while self._sending and self._sending[0][0].done():
            self._sending.popleft()

    def wait(self) -> None:
        """Wait until everything has left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _isend(self, data: Array, round: int) -> None:
        self._counters.bytes_sent += data.nbytes
        self._sending.append((self._lane.isend(data, self._to, round), data))


class MessageReceiver:
    """Receives values from one rank.

    Args:
        lane: between the ranks of a pipeline.
        source: the rank on it.
        device: where tensors are put.
        clock: this rank's, in seconds.
        counters: count the time waited.
    """

    def __init__(
        self,
        lane: Lane,
        source: int,
        device: torch.device,
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._lane = lane
        self._source = source
        self._device = device
        self._form = b""

    def receive(self, round: int) -> Any:
        """Wait for a value; its tensors are this rank's own, and require gradients where the sender's did."""
        start_s = self._clock()
        value = self._receive(round)
        waited_s = self._clock() - start_s
        # Nothing hides this: the stage has nothing else to do.
        self._counters.overlap.under_way_s += waited_s
        self._counters.overlap.exposed_wait_s += waited_s
        return value

    def _receive(self, round: int) -> Any:
        header = np.empty(1, dtype=np.int64)
        self._lane.irecv(header, self._source, round).wait()
        if header[0]:
            form = np.empty(header[0], dtype=np.uint8)
            self._lane.irecv(form, self._source, round).wait()
            self._form = form.tobytes()
        # Between ranks of one job only: what is unpickled was pickled by the same program.
        leaves, structure = tree_flatten(pickle.loads(self._form))
        received = [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, _Form) else x for x in leaves]
        requests = [
            self._lane.irecv(_as_bytes(tensor), self._source, round)
            for tensor, form in zip(received, leaves, strict=True)
            if isinstance(form, _Form) and tensor.numel()
        ]
        for request in requests:
            request.wait()
        placed = [
            tensor.to(self._device).requires_grad_(form.requires_grad) if isinstance(form, _Form) else tensor
            for tensor, form in zip(received, leaves, strict=True)
        ]
        return tree_unflatten(placed, structure)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Form(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)


def _as_bytes(tensor: Tensor) -> Array:
    data: Array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return data
