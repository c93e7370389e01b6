"""The passes on the CPU, compiled by Numba, without the GIL and kept on disk.

The compiled loops are in `hocket_redsync.kernels.loops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from hocket_redsync.kernels import loops
from hocket_redsync.kernels.api import NOTHING_PASSES, Found, Kernels, Memory, Ranking, Update, mode_of
from hocket_redsync.kernels.threads import in_pieces

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array


class CpuKernels(Kernels):
    """Kernels by Numba, on as many threads as torch may use; results do not depend on their number."""

    def __init__(self) -> None:
        _load()

    def is_finite(self, data: Tensor) -> bool:
        values = data.detach().numpy()
        keys = values.view(f"i{values.itemsize}")
        infinity = keys.dtype.type(NOTHING_PASSES[values.itemsize] - 1)
        mask = keys.dtype.type(Ranking.MAGNITUDE.flip_and_mask(values.itemsize)[1])
        return all(in_pieces(len(keys), lambda start, stop: loops.is_below(keys[start:stop], mask, infinity)))

    def advance(
        self, memory: Memory, update: Update | None, ranking: Ranking, floor: int, capacity: int
    ) -> Found:
        residual = memory.residual.detach().numpy()
        integer, real = np.dtype(f"i{residual.itemsize}").type, residual.dtype.type
        none = residual[:0]
        given = memory.given.detach().numpy()
        velocity = none if memory.velocity is None else memory.velocity.detach().numpy()
        parameter = none if update is None or update.parameter is None else update.parameter.detach().numpy()
        momentum, decay = (0.0, 0.0) if update is None else (update.momentum, update.decay)
        flip, mask = map(integer, ranking.flip_and_mask(residual.itemsize))

        def run(start: int, stop: int) -> Found:
            room = min(capacity, stop - start)
            indices, values = np.empty(room, np.int32), np.empty(room, residual.dtype)
            own = residual[start:stop]
            count = loops.advance(
                mode_of(update),
                given[start:stop],
                velocity[start:stop],
                own,
                own.view(integer),
                parameter[start:stop],
                real(momentum),
                real(decay),
                flip,
                mask,
                integer(floor),
                memory.start + start,
                indices,
                values,
            )
            return Found(indices[:count], values[:count], count)

        return _joined(in_pieces(len(residual), run), capacity)

    def collect(self, handles: Sequence[Found]) -> list[Found]:
        return list(handles)

    def sample(self, residual: Tensor, size: int) -> Array:
        values = residual.detach().numpy()
        # An odd step: a power of two would meet the same columns of a matrix again and again.
        return values[:: (len(values) // size) | 1]

    def clear(self, flat: Tensor, indices: Array) -> None:
        loops.clear(flat.detach().numpy(), indices)


def add_message(
    out: Array,
    weight: float,
    places: tuple[Array, Array, Array],
    values: tuple[Array, Array, Array],
    indices: tuple[Array, Array],
) -> None:
    """Add weight * message to `out`, [numel], in one call for all parameters; see `hocket_redsync.message`.

    Args:
        out: float32 or float64, flat.
        weight: rounded to the dtype of `out` first, as torch does.
        places: the first element of each dense parameter, its number of elements, and each mean's number of elements.
        values: values of elements with an index, means, and dense values.
        indices: int32, those of elements with a value each, and those of elements with a mean.

    Raises:
        IndexError: an index beyond `out`.
    """
    if not loops.add_message(out, out.dtype.type(weight), *places, *values, *indices):
        raise IndexError(
            f"a received message has an index beyond its segment of {len(out)} elements: it is damaged, or from "
            "another version. Install the same hocket-redsync on all ranks"
        )


def _joined(pieces: list[Found], capacity: int) -> Found:
    count = sum(piece.count for piece in pieces)
    if len(pieces) == 1:
        return pieces[0]
    indices = np.concatenate([piece.indices for piece in pieces])[:capacity]
    values = np.concatenate([piece.values for piece in pieces])[:capacity]
    return Found(indices, values, count)


@cache
def _load() -> None:
    """Compile all kernels now, or read them from disk."""
    kernels = CpuKernels.__new__(CpuKernels)
    for dtype in (torch.float32, torch.float64):
        tensor = torch.zeros(1, dtype=dtype)
        kernels.is_finite(tensor)
        kernels.advance(Memory(tensor, tensor.clone(), None, 0), Update(), Ranking.MAGNITUDE, 1, 1)
        indices = np.zeros(0, np.int32)
        kernels.clear(tensor, indices)
        # As they come from a message: not writable, which makes another type for Numba.
        none = _read_only(np.zeros(0, tensor.numpy().dtype))
        counts, places = (np.zeros(0, np.int64),) * 3, (_read_only(indices),) * 2
        add_message(tensor.numpy(), 1.0, counts, (none,) * 3, places)
        add_message(tensor.numpy(), 1.0, counts, (none.copy(),) * 3, (indices,) * 2)


def _read_only(array: Array) -> Array:
    array = array.view()
    array.flags.writeable = False
    return array
