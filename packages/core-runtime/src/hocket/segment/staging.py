"""Copies between buffers on a device and their twins in host memory, which nobody but their events waits for."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Staging", "is_captured"]


class Staging:
    """A segment's copies out of a device and into it.

    Copies out run on a stream of their own, so that what is computed meanwhile goes on; copies in on the current one,
    since what follows needs them. Both twins are pinned on CUDA.

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

    def begin_out(self, numel: int, further: int | None) -> None:
        """Copy the first `numel` elements out, and another one, when the current stream has come here."""
        current, copies = self._current(), _copies(self._outgoing.device)
        copies.wait_stream(current)
        if self._brings:  # perhaps on another stream; what arrives next overwrites what it brings
            copies.wait_event(self._is_in)
        with self._module.stream(copies):
            self.outgoing[:numel].copy_(self._outgoing[:numel], non_blocking=True)
            if further is not None:
                self.outgoing[further].copy_(self._outgoing[further], non_blocking=True)
        self._is_out.record(copies)

    def is_out(self) -> bool:
        """Return whether what `begin_out` copies is there; never blocks."""
        return bool(self._is_out.query())

    def wait_out(self) -> None:
        """Wait until what `begin_out` copies is there."""
        self._is_out.synchronize()

    def begin_in(self) -> None:
        """Copy in, before what the current stream does next."""
        self._incoming.copy_(self.incoming, non_blocking=True)
        self._is_in.record(self._current())
        self._brings = True

    def _current(self) -> Any:
        return self._module.current_stream(self._outgoing.device)


@cache
def _copies(device: torch.device) -> Any:
    """Return the stream for all copies out of a device."""
    return torch.get_device_module(device).Stream(device)


def is_captured(device: torch.device) -> bool:
    """Return whether what the current stream is given is recorded as a graph, and not carried out."""
    return device.type != "cpu" and bool(torch.get_device_module(device).is_current_stream_capturing())
