"""Loaders of ranks that may have different numbers of batches, as those of IterableDatasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class EvenBatches:
    """A loader that ends on all ranks where one is out of batches, as the others would wait for it.

    Args:
        loader: this rank's.
        agree: returns whether all ranks say yes; collective.
    """

    def __init__(self, loader: Iterable[Any], agree: Callable[[bool], bool]) -> None:
        self._loader, self._agree = loader, agree

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if not self._agree(True):
                return
            yield batch
        self._agree(False)

    def __getattr__(self, name: str) -> Any:
        # Lightning looks for the sampler, the dataset and a state.
        return getattr(self.__dict__["_loader"], name)
