"""The samples of a task, as what they are, and data sets as the library `datasets` has them."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from hocket.task import BatchedSamples, Task

S = TypeVar("S", bound=BatchedSamples)


def samples_of(kind: type[S], task: Task, seed: int = 0) -> tuple[S, S]:
    """Return the samples for training and the held-out ones."""
    data = task.data(seed)
    assert isinstance(data.train, kind)
    assert isinstance(data.valid, kind)
    return data.train, data.valid


def split_of(features: dict[str, Any], columns: dict[str, list[Any]]) -> Any:
    """Return a split of the library `datasets`, or skip the test where that is not installed."""
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    described = datasets.Features(features)
    encoded = {
        name: [described[name].encode_example(each) for each in column] for name, column in columns.items()
    }
    # With a fingerprint of its own: the library's pickles more than every version of what it uses lets it.
    return datasets.Dataset(
        pyarrow.table(encoded, schema=described.arrow_schema),
        info=datasets.DatasetInfo(features=described),
        fingerprint="-".join(columns),
    )
