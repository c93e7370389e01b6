"""The passes on CUDA, by CuPy's raw kernels on torch's current stream.

Passes are only started; `collect` waits for all of a segment's at once, and brings the candidates to the host, where
the rest of the selection is done as on the CPU, on a few elements in a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hocket.api import how_to_install
from hocket_redsync.kernels.api import NOTHING_PASSES, Found, Kernels, Memory, Ranking, Update, mode_of

if TYPE_CHECKING:
    from cupy import RawModule
    from torch import Tensor

    from hocket.api import Array

#: The kernels' source.
SOURCE = Path(__file__).with_name("advance.cu")

#: Options of its compilation, for NVRTC and nvcc.
COMPILE_OPTIONS = ("-std=c++17", "-fmad=false")

_THREADS = 256
_ITEMS = 4
_BLOCKS_PER_PROCESSOR = 8


@dataclass(frozen=True, eq=False)
class _Handle:
    """A pass that may be under way: the buffers for the elements that it finds, and their number, int32 [1]."""

    indices: Tensor
    values: Tensor
    count: Tensor


class GpuKernels(Kernels):
    """Kernels by CuPy, on one CUDA device.

    Raises:
        ValueError: CuPy is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _module()
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = processors * _BLOCKS_PER_PROCESSOR

    def is_finite(self, data: Tensor) -> bool:
        integer, suffix = _types(data)
        _, mask = Ranking.MAGNITUDE.flip_and_mask(data.element_size())
        infinity = NOTHING_PASSES[data.element_size()] - 1
        found = torch.zeros(1, dtype=torch.int32, device=self._device)
        arguments = (_address(data), np.int64(len(data)), integer(mask), integer(infinity), _address(found))
        self._launch(f"find_nonfinite_{suffix}", len(data), arguments)
        return not bool(found)

    def advance(
        self, memory: Memory, update: Update | None, ranking: Ranking, floor: int, capacity: int
    ) -> _Handle:
        residual = memory.residual
        integer, suffix = _types(residual)
        real = np.dtype(f"f{residual.element_size()}").type
        capacity = min(capacity, len(residual))
        indices = torch.empty(capacity, dtype=torch.int32, device=self._device)
        values = torch.empty(capacity, dtype=residual.dtype, device=self._device)
        count = torch.zeros(1, dtype=torch.int32, device=self._device)
        momentum, decay, parameter = 0.0, 0.0, None
        if update is not None:
            momentum, decay, parameter = update.momentum, update.decay, update.parameter
        flip, mask = ranking.flip_and_mask(residual.element_size())
        arguments = (
            np.int32(mode_of(update)),
            _address(memory.given),
            _address(memory.velocity),
            _address(residual),
            _address(parameter),
            real(momentum),
            real(decay),
            np.int64(len(residual)),
            integer(flip),
            integer(mask),
            integer(floor),
            np.int32(memory.start),
            _address(indices),
            _address(values),
            np.int32(capacity),
            _address(count),
        )
        self._launch(f"advance_{suffix}", len(residual), arguments)
        return _Handle(indices, values, count)

    def collect(self, handles: Sequence[_Handle]) -> list[Found]:
        if not handles:
            return []
        counts = torch.cat([handle.count for handle in handles]).tolist()
        rooms = [min(count, len(handle.indices)) for count, handle in zip(counts, handles, strict=True)]
        pairs = list(zip(handles, rooms, strict=True))
        # In the order of their places, which are the parameters' order too; as warps have found them, it would not be
        # the same twice.
        indices, order = torch.cat([handle.indices[:room] for handle, room in pairs]).sort()
        values = torch.cat([handle.values[:room] for handle, room in pairs])[order]
        bounds = np.cumsum(rooms)[:-1]
        parts = (np.split(both.cpu().numpy(), bounds) for both in (indices, values))
        return [Found(*found) for found in zip(*parts, counts, strict=True)]

    def sample(self, residual: Tensor, size: int) -> Array:
        values: Array = residual[:: (len(residual) // size) | 1].cpu().numpy()
        return values

    def clear(self, flat: Tensor, indices: Array) -> None:
        flat.index_fill_(0, torch.from_numpy(indices).to(flat.device).long(), 0)

    def _launch(self, name: str, numel: int, arguments: tuple[object, ...]) -> None:
        import cupy

        blocks = min(self._most_blocks, -(-numel // (_THREADS * _ITEMS)))
        if blocks == 0:
            return
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(self._device).cuda_stream)
        with cupy.cuda.Device(self._device.index or 0), stream:
            self._module.get_function(name)((blocks,), (_THREADS,), arguments)


@cache
def _module() -> RawModule:
    try:
        import cupy
    except ImportError as error:
        major = (torch.version.cuda or "13").partition(".")[0]
        raise ValueError(
            f"redsync needs CuPy for gradients on CUDA: {how_to_install('hocket-redsync', f'cuda{major}')}, "
            "or use compressor topk"
        ) from error
    # CuPy keeps what it has compiled on disk.
    return cupy.RawModule(code=SOURCE.read_text(), options=COMPILE_OPTIONS)


def _types(data: Tensor) -> tuple[type[np.signedinteger], str]:
    """Return the type of keys and the suffix of kernels for float32 or float64."""
    return (np.int32, "f32") if data.element_size() == 4 else (np.int64, "f64")


def _address(tensor: Tensor | None) -> np.uint64:
    return np.uint64(0 if tensor is None else tensor.data_ptr())
