"""Copies of tensors in host memory, for a thread that writes them while training changes the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: The size of a block of memory in bytes. torch rounds pinned memory up to a power of two, so that one piece of a
#: file's size might be nearly twice as large.
BLOCK_BYTES = 1 << 26


class HostCopies:
    """Host memory for the copies of one save at a time; the next save's take the same memory.

    It has the size of a rank's file. Where tensors are on a CUDA device it is pinned: then the copies run on the
    device's stream, before whatever training does next, and `take` waits for none of them.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Return the size of the memory in bytes."""
        return sum(block.numel() for block in self._blocks)

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copy the bytes of tensors of any shape and device, one tensor behind the other.

        Args:
            tensors: in the order of the copies.

        Returns:
            The bytes, in blocks, valid until the next call; and a function that waits, on any thread, until they are
            complete.
        """
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        total = sum(tensor.nbytes for tensor in tensors)
        self._make_room(total, pinned=bool(devices))
        start = 0
        for tensor in tensors:
            left = bytes_of(tensor)
            while left.numel():
                number, place = divmod(start, BLOCK_BYTES)
                part = left[: BLOCK_BYTES - place]
                own = self._blocks[number][place : place + part.numel()]
                own.copy_(part, non_blocking=part.device.type == "cuda")
                start, left = start + part.numel(), left[part.numel() :]
        sizes = _sizes(total)
        return [block[:size] for block, size in zip(self._blocks, sizes, strict=False)], _wait_for(devices)

    def _make_room(self, nbytes: int, *, pinned: bool) -> None:
        if pinned and not all(block.is_pinned() for block in self._blocks):
            self._blocks = []
        for number, size in enumerate(_sizes(nbytes)):
            if number == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[number].numel() < size:
                self._blocks[number] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _sizes(nbytes: int) -> list[int]:
    """Return the sizes of blocks for `nbytes`: whole ones, and the rest."""
    whole, rest = divmod(nbytes, BLOCK_BYTES)
    return [BLOCK_BYTES] * whole + [rest] * (rest > 0)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes [nbytes], in the order of its elements; a view where these lie so."""
    value = tensor.detach().contiguous()
    # Not `reshape`: it keeps the odd strides that tensors of 0 or 1 elements may have.
    return value.as_strided((value.numel(),), (1,), value.storage_offset()).view(torch.uint8)


def _wait_for(devices: set[torch.device]) -> Callable[[], None]:
    """Return a function that waits for what the current streams of devices have been given so far."""
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
