"""The access to Numba: compilation of functions, and memory that is known by its address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numba
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from llvmlite import ir
    from numba.core.base import BaseContext
    from numba.core.typing import Context, Signature

#: The signature of an intrinsic, and what writes the instructions of a call.
Intrinsic: TypeAlias = "tuple[Signature, Callable[..., ir.Value]]"

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile `function` at its first call; it runs without the GIL, and is cached for later processes."""
    try:
        result: _Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # there is no folder that can be written for the cache
        result = numba.njit(nogil=True)(function)
    return result


def cache_folder() -> str:
    """Return the folder of cached compiled functions; empty if none can be written."""
    return str(compiled(_nothing).stats.cache_path or "")  # type: ignore[attr-defined]


def _nothing() -> None:
    pass


@contextlib.contextmanager
def compiled_once(function: Any) -> Iterator[None]:
    """Let one process of the host compile and cache `function`; the others wait, and load it.

    Otherwise all of a job's ranks would compile it at the first start: seconds of a core each.
    """
    if _is_kept(function):
        yield
        return
    with contextlib.ExitStack() as stack:
        # Where nothing is kept, or files cannot be locked, everybody compiles.
        with contextlib.suppress(OSError, TypeError):
            import fcntl

            lock = os.open(Path(function.stats.cache_path) / "compiling", os.O_CREAT | os.O_RDWR, 0o666)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_kept(function):
            stack.close()
        yield


def _is_kept(function: Any) -> bool:
    folder = function.stats.cache_path
    line = function.py_func.__code__.co_firstlineno
    return bool(folder) and any(Path(folder).glob(f"*.{function.__name__}-{line}.*.nbi"))


@intrinsic
def pointer_to(typing: Context, address: types.Type, like: types.Type) -> Intrinsic:
    """Return a pointer to `address`, uint64, with elements of the dtype of the array `like`."""
    pointer = types.CPointer(like.dtype)  # type: ignore[attr-defined]

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.uint64, like), generate


@intrinsic
def fence(typing: Context) -> Intrinsic:
    """Make this thread's writes visible, also those around the caches, before its later reads and writes."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
