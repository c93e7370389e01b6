"""The passes over gradients and residuals, with one interface for every device: Numba on the CPU, CuPy on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket_redsync.kernels.api import Found, Kernels, Memory, Ranking, Update

if TYPE_CHECKING:
    import torch

__all__ = ["Found", "Kernels", "Memory", "Ranking", "Update", "kernels_for"]


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for tensors on `device`, compiled now or loaded from disk, before any training step.

    Raises:
        ValueError: a device without kernels, or CUDA without CuPy.
    """
    if device.type == "cpu":
        from hocket_redsync.kernels.cpu import CpuKernels

        return CpuKernels()
    if device.type == "cuda":
        from hocket_redsync.kernels.gpu import GpuKernels

        return GpuKernels(device)
    raise ValueError(
        f"redsync has kernels for cpu and cuda, not for {device.type}: use compressor topk there"
    )
