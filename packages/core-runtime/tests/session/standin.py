"""A device that stands in for a GPU: memory of the host behind torch's PrivateUse1 key, with autograd's own thread.

It needs no compiler: a tensor's DLPack capsule names the device that its memory is on, and naming another one makes a
view of the same memory there. Every operation falls back to the CPU's. A copy that does not block has only happened
when an event behind it is waited for, or looked at a second time; what it reads must still be what it was before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
_CPU, _EXTENSION = 1, 12  # kDLCPU, kDLExtDev
_BEHIND_DATA = ctypes.sizeof(
    ctypes.c_void_p
)  # a DLTensor begins with its data's address, then kind and number

#: Operations that give the host a value, or an object of a size that depends on one: it waits for the device there.
_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")

#: What has made the host wait for the device, in order.
waits: list[str] = []
#: How many copies that do not block have happened.
copied = 0
#: The threads that operations of a backward came from.
threads: set[str] = set()
#: Whether the current stream is being captured.
capturing = False
#: Whether the device is in a kernel that does not end, as NCCL's where another rank has died.
hung = False

_queue: list[Callable[[], None]] = []
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _viewed(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """Return a view of a tensor's memory on a kind of device."""
    capsule = torch._C._to_dlpack(tensor)
    device = (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + _BEHIND_DATA)
    device[0], device[1] = kind, 0
    viewed: torch.Tensor = torch._C._from_dlpack(capsule)
    return viewed


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory on the CPU."""
    return _viewed(tensor, _CPU) if tensor.device.type == NAME else tensor


def _fall_back(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out an operation on the CPU, with views of its tensors."""
    name = op.name()
    if name in ("aten::_copy_from", "aten::_copy_from_and_resize"):
        return _copy(*args, **kwargs)
    if name in _WAITING:
        waits.append(name)
    if threading.current_thread() is not threading.main_thread():
        threads.add(type(threading.current_thread()).__name__)
    out = kwargs.get("out")
    if (
        isinstance(out, torch.Tensor) and out.device.type == NAME and out.numel() == 0
    ):  # to be resized, which another's memory cannot be
        kwargs["out"] = torch.empty(0, dtype=out.dtype)
        out.data = _fall_back(op, *args, **kwargs)
        return out
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def down(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != NAME:
            return tensor
        view = here(tensor)
        given[id(view)] = view, tensor
        return view

    def up(tensor: torch.Tensor) -> torch.Tensor:
        return given[id(tensor)][1] if id(tensor) in given else _viewed(tensor, _EXTENSION)

    def to_cpu(device: torch.device) -> torch.device:
        return torch.device("cpu")

    args, kwargs = tree_map_only(torch.device, to_cpu, tree_map_only(torch.Tensor, down, (args, kwargs)))
    return tree_map_only(torch.Tensor, up, op(*args, **kwargs))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    comes, given, to = target.device.type == "cpu", here(source), here(target)
    if not non_blocking:
        if comes:
            waits.append("a copy that blocks")
            _happen(len(_queue))
        to.copy_(given)
        return target
    before = given.clone()

    def happen() -> None:
        global copied
        copied += 1
        if not _same(given, before):
            raise AssertionError("what an asynchronous copy reads has changed before it has happened")
        if comes:
            to.copy_(before)

    if not comes:
        to.copy_(before)
    _queue.append(happen)
    return target


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes())


def _happen(number: int) -> None:
    while number > 0 and _queue:
        _queue.pop(0)()
        number -= 1


class Event:
    """Marks what has been queued so far."""

    def __init__(self) -> None:
        self._until: Callable[[], None] | None = None
        self._looked = False

    def record(self, stream: object = None) -> None:
        self._until, self._looked = (_queue[-1] if _queue else None), False

    def query(self) -> bool:
        looked, self._looked = self._looked, True
        if hung:
            return False
        if looked:
            self.synchronize()
        return looked or self._until not in _queue

    def synchronize(self) -> None:
        if self._until in _queue:
            _happen(_queue.index(self._until) + 1)


class Stream:
    """Everything is in one order."""

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None:
        waits.append("Stream.synchronize")
        _happen(len(_queue))


class _Module:
    """What `torch.cuda` is to a GPU."""

    Event, Stream = Event, Stream
    _current = Stream()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_stream(self, device: object = None) -> Any:
        return self._current

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def is_current_stream_capturing(self) -> bool:
        return capturing


def set_up() -> torch.device:
    """Make the device known to this process, for good, and return it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_fall_back, "PrivateUse1")
    _libraries.append(library)
    return torch.device(NAME, 0)


_libraries: list[Any] = []  # one that is collected takes its fallback back
