"""Copies between buffers on a device and their twins in host memory, which run in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from hocket.transport.request import FunctionRequest, Request


class Staging:
    """The copies of a segment out of a device and into it.

    Copies out run on a stream of their own, beside computing; copies in run on the current one, as later work needs
    them. Both twins are pinned on CUDA.

    Args:
        outgoing, incoming: [n], on one device.
    """

    def __init__(self, outgoing: Tensor, incoming: Tensor) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        pinned = outgoing.device.type == "cuda"
        self.outgoing = torch.empty_like(outgoing, device="cpu", pin_memory=pinned)
        self.incoming = torch.empty_like(incoming, device="cpu", pin_memory=pinned)
        self._module = torch.get_device_module(outgoing.device)
        self._is_out, self._is_in = self._module.Event(), self._module.Event()
        self._brings = False
        is_out = self._is_out
        self._out = FunctionRequest(lambda: bool(is_out.query()), lambda _: is_out.synchronize())

    def begin_out(self, numel: int, further: int | None) -> Request:
        """Begin to copy the first `numel` elements out, and another one, once the current stream gets here."""
        current, copies = self._current(), _copies(self._outgoing.device)
        copies.wait_stream(current)
        if self._brings:  # perhaps on another stream; what arrives next overwrites what it brings
            copies.wait_event(self._is_in)
        with self._module.stream(copies):
            self.outgoing[:numel].copy_(self._outgoing[:numel], non_blocking=True)
            if further is not None:
                self.outgoing[further].copy_(self._outgoing[further], non_blocking=True)
        self._is_out.record(copies)
        return self._out

    def begin_in(self) -> None:
        """Copy in, before the current stream's next work."""
        self._incoming.copy_(self.incoming, non_blocking=True)
        self._is_in.record(self._current())
        self._brings = True

    def _current(self) -> torch.Stream:
        stream: torch.Stream = self._module.current_stream(self._outgoing.device)
        return stream


class TrailerStaging:
    """The copies of a segment's trailers, which the host writes and reads, while all data stay on a device.

    They run on the current stream, which lanes of the device use, too.

    Args:
        outgoing, incoming: [n], on one device, of which the trailers begin at `numel`.
        numel: elements of data.
    """

    def __init__(self, outgoing: Tensor, incoming: Tensor, numel: int) -> None:
        self._sent = outgoing[:numel]
        self._outgoing, self._incoming = outgoing[numel:], incoming[numel:]
        self._numel = numel
        pinned = outgoing.device.type == "cuda"
        self.outgoing = torch.empty_like(self._outgoing, device="cpu", pin_memory=pinned)
        self.incoming = torch.empty_like(self._incoming, device="cpu", pin_memory=pinned)
        self._finite = torch.ones((), dtype=torch.bool, pin_memory=pinned)
        self._module = torch.get_device_module(outgoing.device)
        self._is_in = self._module.Event()
        self._brings = False
        #: Waits until a condition is true, which the device makes so.
        self.wait: Callable[[Callable[[], bool]], object] | None = None

    def begin_out(self, further: int | None) -> None:
        """Copy the trailer to the device, except the value at `further`, which the device has written."""
        kept = self._outgoing.numel() if further is None else further - self._numel
        for part in (slice(0, kept), slice(kept + 1, None)):
            self._outgoing[part].copy_(self.outgoing[part], non_blocking=True)

    def begin_in(self, *, looks: bool) -> None:
        """Copy the received trailer out of the device, once the current stream gets here.

        Args:
            looks: whether the device checks the sent data for NaN and Inf, for `was_finite`.
        """
        self.incoming.copy_(self._incoming, non_blocking=True)
        if looks:
            self._finite.copy_(torch.isfinite(self._sent).all(), non_blocking=True)
        self._is_in.record(self._module.current_stream(self._incoming.device))
        self._brings = True

    def was_finite(self) -> bool:
        """Wait as `wait_in`, and return whether the sent data held neither NaN nor Inf."""
        self.wait_in()
        return bool(self._finite)

    def wait_in(self) -> None:
        """Wait until the copy of `begin_in` is done."""
        if not self._brings:
            return
        if self.wait is not None:
            self.wait(self._is_in.query)
        self._is_in.synchronize()
        self._brings = False


@cache
def _copies(device: torch.device) -> torch.Stream:
    """Return the stream for all copies out of a device."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream records a graph in place of running its work."""
    return device.type != "cpu" and bool(torch.get_device_module(device).is_current_stream_capturing())
