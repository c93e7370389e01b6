"""Copies of tensors in host memory, for a thread that writes them while training changes the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """Host memory for the copies of one save at a time; the next save's take the same memory.

    It has the size of a rank's file. Where tensors are on a CUDA device it is pinned: then the copies run on the
    device's stream, before whatever training does next, and `take` waits for none of them.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Return the size of the memory in bytes."""
        return self._memory.numel()

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy tensors of any shape and device, flat, one behind the other.

        Args:
            tensors: by name, those with larger elements first, so that each lies at a multiple of its element's size.

        Returns:
            The copies, with the tensors' dtypes and shapes, valid until the next call; and a function that waits, on
            any thread, until they are complete.
        """
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        self._make_room(sum(tensor.nbytes for tensor in tensors.values()), pinned=bool(devices))
        copies: dict[str, Tensor] = {}
        start = 0
        for name, tensor in tensors.items():
            value = tensor.detach().contiguous()
            place = self._memory[start : start + value.nbytes]
            start += value.nbytes
            # Bytes: some dtypes cannot be copied. Not `reshape`: it keeps odd strides of tensors of 0 or 1 elements.
            flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
            place.copy_(flat, non_blocking=value.device.type == "cuda")
            copies[name] = place.view(value.dtype).view(value.shape)
        return copies, _wait_for(devices)

    def _make_room(self, nbytes: int, *, pinned: bool) -> None:
        if self._memory.numel() < nbytes or self._memory.is_pinned() < pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back before the larger one is taken
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def _wait_for(devices: set[torch.device]) -> Callable[[], None]:
    """Return a function that waits for what the current streams of devices have been given so far."""
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
