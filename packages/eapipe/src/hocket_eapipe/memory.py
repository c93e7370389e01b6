"""A count of the bytes of living tensors: for plans, tests and benchmarks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """A count of the storages that torch's operations make while it is entered, and of those given to `count`.

    Attributes:
        held: bytes of the storages that are alive now.
        peak: the most that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._alive: dict[int, weakref.finalize[[int, int], UntypedStorage]] = {}

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already; those that share a storage count once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._alive:
                continue
            # A dead storage's address may be another one's soon.
            self._alive[storage._cdata] = weakref.finalize(
                storage, self._end, storage._cdata, storage.nbytes()
            )
            self._alive[storage._cdata].atexit = False
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = function(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _end(self, key: int, nbytes: int) -> None:
        del self._alive[key]
        self.held -= nbytes
