"""The global random states that real ranks would each have, swapped as the token moves.

torch's default CPU generator (once torch is imported), NumPy's legacy global state and `random`'s. Without
the swap a model with dropout would draw in the order in which the scheduler runs the ranks. CUDA generators
are not swapped: draw on the CPU, or from a generator of your own, where virtual ranks share a GPU.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, NamedTuple

import numpy as np

__all__ = ["RandomStates"]

_random: Any = np.random  # whose stubs lack `get_bit_generator`
#: `mt19937_state` of NumPy: uint32 key[624] and int pos.
_MT19937_BYTES = 624 * 4 + 4


class _NumpyState(NamedTuple):
    """NumPy's legacy global state."""

    generator: Any  # the bit generator behind the functions of `np.random`
    state: dict[str, Any]
    raw: bytes | None  # the generator's memory, None if it is not the usual MT19937


class _State(NamedTuple):
    """Everything that one rank draws from."""

    python: tuple[Any, ...]
    numpy: _NumpyState
    torch: Any  # a uint8 tensor, None while torch is not imported


class RandomStates:
    """One set of global random states per rank; each starts as what the caller of `World.run` had."""

    def __init__(self) -> None:
        self._outside = _State(random.getstate(), _read_numpy(None), _read_torch())
        self._by_rank: dict[int, _State] = {}
        self._loaded = self._outside
        self._rank: int | None = None

    def enter(self, rank: int) -> None:
        """Save the states of the rank that held the token and load `rank`'s."""
        if rank == self._rank:
            return
        current = self._read()
        if self._rank is not None:
            self._by_rank[self._rank] = current
        self._load(self._by_rank.get(rank, self._outside), current)
        self._rank = rank

    def leave(self) -> None:
        """Restore what the caller of `World.run` had."""
        if self._rank is not None:
            self._load(self._outside, self._read())
            self._rank = None

    def _read(self) -> _State:
        return _State(random.getstate(), _read_numpy(self._loaded.numpy), _read_torch())

    def _load(self, state: _State, current: _State) -> None:
        random.setstate(state.python)
        if not _is_same(state.numpy, current.numpy):
            _write_numpy(state.numpy)
        _write_torch(state.torch)
        self._loaded = state


def _read_numpy(loaded: _NumpyState | None) -> _NumpyState:
    """Return NumPy's state, which is `loaded` itself if nothing was drawn since `loaded` was in force.

    `get_state` and `set_state` cost 50 us together, twice a switch of threads, and few programs draw from
    them in training. So the generator's memory is compared, which changes with every draw but one: the second
    of a pair of normal numbers comes from a cache beside it, whose state only `get_state` tells.
    """
    generator = _random.get_bit_generator()
    raw = None
    if type(generator) is np.random.MT19937:
        raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    unchanged = loaded is not None and generator is loaded.generator and raw is not None and raw == loaded.raw
    if loaded is not None and unchanged and not loaded.state["has_gauss"]:
        return loaded
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
