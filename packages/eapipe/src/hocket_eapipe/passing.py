"""Messages between stages: nested values with tensors, also within a process.

A value is a tensor, or tuples, lists and dictionaries of tensors and of what `hocket.messages` holds, in any nesting;
form, dtypes and shapes may change from batch to batch. As a message it is the length of its form (0 where that is
what it was last time), its form, and each tensor that has elements, from where it lies. All of them have the same round
on one lane, on which messages between two ranks keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hocket.api import Array, Counters, Lane, Request, messages, plain


def detached(value: plain.Batch) -> plain.Batch:
    """Return a value without graphs, in the same memory; tensors that required gradients are leaves that do."""
    return tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), value)


class MessageSender:
    """The sender of values to one rank.

    Args:
        lane: between the ranks of a pipeline.
        to: the rank on it.
        counters: counters of the bytes sent.
    """

    def __init__(self, lane: Lane, to: int, counters: Counters) -> None:
        self._lane = lane
        self._counters = counters
        self._to = to
        self._form: messages.Form | None = None
        #: The sends under way, with their memory.
        self._sending: deque[tuple[Request, Array]] = deque()

    def send(self, value: plain.Batch, round: int) -> None:
        """Send a value; its tensors must not be written before they have arrived.

        Raises:
            UserError: it holds something that no message can; the error names its place.
        """
        form, tensors = messages.take_apart(value)
        is_new = form != self._form
        self._form = form
        message = form.encode() if is_new else b""
        self._isend(np.array([len(message)], dtype=np.int64), round)
        if is_new:
            self._isend(np.frombuffer(message, dtype=np.uint8), round)
        for tensor in tensors:
            if tensor.numel():
                self._isend(messages.as_bytes(tensor), round)
        self.release()

    def release(self) -> None:
        """Free the memory of sends that have ended; never blocks."""
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
    """The receiver of values from one rank.

    Args:
        lane: between the ranks of a pipeline.
        source: the rank on it.
        device: the device of the received tensors.
        clock: this rank's, in seconds.
        counters: counters of the time waited.
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
        self._form: messages.Form | None = None

    def receive(self, round: int) -> plain.Batch:
        """Wait for a value; its tensors are this rank's own, and require gradients where the sender's did."""
        start_s = self._clock()
        value = self._receive(round)
        waited_s = self._clock() - start_s
        # Nothing overlaps with this wait: the stage has nothing else to do.
        self._counters.under_way_s += waited_s
        self._counters.exposed_wait_s += waited_s
        return value

    def _receive(self, round: int) -> plain.Batch:
        header = np.empty(1, dtype=np.int64)
        self._lane.irecv(header, self._source, round).wait()
        if header[0]:
            form = np.empty(header[0], dtype=np.uint8)
            self._lane.irecv(form, self._source, round).wait()
            self._form = messages.Form.decode(form.tobytes())
        assert self._form is not None  # the first value brings one
        received = [tensor.empty() for tensor in self._form.tensors]
        requests = [
            self._lane.irecv(messages.as_bytes(t), self._source, round) for t in received if t.numel()
        ]
        for request in requests:
            request.wait()
        return messages.put_together(self._form, [tensor.to(self._device) for tensor in received])
