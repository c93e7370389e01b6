"""The global random states of a process: torch's default generator, NumPy's legacy one and `random`'s.

Virtual ranks swap them, and a checkpoint keeps them. Importing this imports no torch.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
from numpy.random import mtrand

from hocket.plain import Tree

if TYPE_CHECKING:
    from torch import Tensor

#: `mt19937_state` of NumPy: uint32 key[624] and int pos.
_MT19937_BYTES = 624 * 4 + 4


class _NumpyState(NamedTuple):
    """NumPy's legacy global state."""

    generator: np.random.BitGenerator  # the bit generator behind the functions of `np.random`
    state: Tree
    raw: bytes | None  # the generator's memory, None if it is not the usual MT19937


class RandomState(NamedTuple):
    """The states of all generators that a process draws from."""

    python: tuple[object, ...]
    numpy: _NumpyState
    torch: Tensor | None  # a uint8 tensor, None while torch is not imported
    cuda: Tensor | None = (
        None  # the same of the current CUDA device, None where it was not asked for or is not in use
    )


class PlainState(TypedDict):
    """The section `random` of a checkpoint: the states as plain values and tensors."""

    python: tuple[object, ...]
    numpy: Tree
    torch: Tensor | None
    cuda: Tensor | None


def read(previous: RandomState | None = None, *, cuda: bool = False) -> RandomState:
    """Return the current states; takes 10 us with `previous`, else 40 us.

    Args:
        previous: states read or written before; those that have not changed since are reused.
        cuda: read that of the current CUDA device, too.
    """
    numpy = _read_numpy(None if previous is None else previous.numpy)
    return RandomState(random.getstate(), numpy, _read_torch(), _read_cuda() if cuda else None)


def write(state: RandomState, current: RandomState | None = None) -> None:
    """Set the generators' states.

    Args:
        state: states from `read` or `from_plain`.
        current: the current states, if the caller has just read them: equal ones are not written again.
    """
    random.setstate(state.python)
    if current is None or not _is_same(state.numpy, current.numpy):
        _write_numpy(state.numpy)
    _write_torch(state.torch)
    if state.cuda is not None:
        _write_cuda(state.cuda)


def to_plain(state: RandomState) -> PlainState:
    """Return the states as mappings, tuples, numbers, arrays and tensors, for a file."""
    return {
        "python": state.python,
        "numpy": state.numpy.state,
        "torch": state.torch,
        "cuda": state.cuda,
    }


def from_plain(plain: PlainState) -> RandomState:
    """Return the states that `to_plain` described, in this process or in another one."""
    numpy = _NumpyState(mtrand.get_bit_generator(), plain["numpy"], None)
    return RandomState(plain["python"], numpy, plain["torch"], plain["cuda"])


def _read_numpy(previous: _NumpyState | None) -> _NumpyState:
    """Return NumPy's state, which is `previous` itself if nothing was drawn since that was in force.

    `get_state` and `set_state` cost 50 us together, twice a switch of threads, and few programs draw from
    them in training. So the generator's memory is compared, which changes with every draw but one: the second
    of a pair of normal numbers comes from a cache beside it, whose state only `get_state` tells.
    """
    generator = mtrand.get_bit_generator()
    raw = None
    if type(generator) is np.random.MT19937:
        raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    unchanged = (
        previous is not None and generator is previous.generator and raw is not None and raw == previous.raw
    )
    if previous is not None and unchanged and not previous.state["has_gauss"]:
        return previous
    return _NumpyState(generator, mtrand.get_state(legacy=False), raw)


def _write_numpy(state: _NumpyState) -> None:
    if mtrand.get_bit_generator() is not state.generator:
        mtrand.set_bit_generator(state.generator)
    mtrand.set_state(state.state)


def _is_same(one: _NumpyState, other: _NumpyState) -> bool:
    """Return whether both are certainly the same state, at the cost of comparing 2.5 KB."""
    if one is other:
        return True
    if one.generator is not other.generator or one.state["has_gauss"] or other.state["has_gauss"]:
        return False
    return one.raw is not None and one.raw == other.raw


def _read_torch() -> Tensor | None:
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    return None if generator is None else generator.get_state()


def _write_torch(state: Tensor | None) -> None:
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch, "default_generator", None) is None:
        return
    # A rank whose states were saved before another one imported torch begins with torch's default seed.
    torch.default_generator.set_state(torch.Generator().get_state() if state is None else state)


def _read_cuda() -> Tensor | None:
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    state: Tensor = torch.cuda.get_rng_state()
    return state


def _write_cuda(state: Tensor) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
