"""The global random states of a process: torch's default generator, NumPy's legacy one and `random`'s.

Virtual ranks swap them, and a checkpoint keeps them. Importing this imports no torch.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["RandomState", "from_plain", "read", "to_plain", "write"]

_random: Any = np.random  # whose stubs lack `get_bit_generator`
#: `mt19937_state` of NumPy: uint32 key[624] and int pos.
_MT19937_BYTES = 624 * 4 + 4


class _NumpyState(NamedTuple):
    """NumPy's legacy global state."""

    generator: Any  # the bit generator behind the functions of `np.random`
    state: dict[str, Any]
    raw: bytes | None  # the generator's memory, None if it is not the usual MT19937


class RandomState(NamedTuple):
    """The states of all generators that a process draws from."""

    python: tuple[Any, ...]
    numpy: _NumpyState
    torch: Any  # a uint8 tensor, None while torch is not imported
    cuda: Any = None  # the same of the current CUDA device, None where it was not asked for or is not in use


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


def to_plain(state: RandomState) -> dict[str, Any]:
    """Return the states as mappings, tuples, numbers, arrays and tensors, for a file."""
    return {
        "python": state.python,
        "numpy": state.numpy.state,
        "torch": state.torch,
        "cuda": state.cuda,
    }


def from_plain(plain: Mapping[str, Any]) -> RandomState:
    """Return the states that `to_plain` described, in this process or in another one."""
    numpy = _NumpyState(_random.get_bit_generator(), plain["numpy"], None)
    return RandomState(plain["python"], numpy, plain["torch"], plain["cuda"])


def _read_numpy(previous: _NumpyState | None) -> _NumpyState:
    """Return NumPy's state, which is `previous` itself if nothing was drawn since that was in force.

    `get_state` and `set_state` cost 50 us together, twice a switch of threads, and few programs draw from
    them in training. So the generator's memory is compared, which changes with every draw but one: the second
    of a pair of normal numbers comes from a cache beside it, whose state only `get_state` tells.
    """
    generator = _random.get_bit_generator()
    raw = None
    if type(generator) is np.random.MT19937:
        raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    unchanged = (
        previous is not None and generator is previous.generator and raw is not None and raw == previous.raw
    )
    if previous is not None and unchanged and not previous.state["has_gauss"]:
        return previous
    return _NumpyState(generator, _random.get_state(legacy=False), raw)


def _write_numpy(state: _NumpyState) -> None:
    if _random.get_bit_generator() is not state.generator:
        _random.set_bit_generator(state.generator)
    _random.set_state(state.state)


def _is_same(one: _NumpyState, other: _NumpyState) -> bool:
    """Return whether both are certainly the same state, at the cost of comparing 2.5 KB."""
    if one is other:
        return True
    if one.generator is not other.generator or one.state["has_gauss"] or other.state["has_gauss"]:
        return False
    return one.raw is not None and one.raw == other.raw


def _read_torch() -> Any:
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    return None if generator is None else generator.get_state()


def _write_torch(state: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if getattr(torch, "default_generator", None) is None:
        return
    # A rank whose states were saved before another one imported torch begins with torch's default seed.
    torch.default_generator.set_state(torch.Generator().get_state() if state is None else state)


def _read_cuda() -> Any:
    torch: Any = sys.modules.get("torch")
    in_use = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.get_rng_state() if in_use else None


def _write_cuda(state: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
