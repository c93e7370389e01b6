"""Folders that the library `datasets` has written, by `save_to_disk`; the library is imported where one is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.api import how_to_install
from hocket.errors import UserError

# A set of splits, and a split alone.
_MARKS = ("dataset_dict.json", "dataset_info.json")


def is_saved(folder: Path) -> bool:
    """Return whether a folder is one that `save_to_disk` has written."""
    return any((folder / mark).is_file() for mark in _MARKS)


def columns_of(folder: Path, key: str, split: str | None, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return columns of a split, each a sequence of values.

    Args:
        folder: as `is_saved` takes it.
        key: the key or argument that named it, for errors.
        split: its name; None for `train`, or the only one.
        names: the columns' names.

    Raises:
        UserError: the library is not installed, cannot read the folder, or there is no such split or column.
    """
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise UserError(
            f"{key}: {folder} was written by the library datasets, which cannot be imported here ({error}): "
            f"{how_to_install('hocket-tasks', 'datasets')}"
        ) from error
    try:
        loaded = load_from_disk(str(folder))
    except Exception as error:
        raise UserError(f"{key}: the library datasets cannot read {folder}: {error}") from error
    if isinstance(loaded, DatasetDict):
        if split is None:
            split = "train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded))
        if split not in loaded:
            raise UserError(f"{key}: {folder} has no split {split!r}; there are: {', '.join(loaded)}")
        loaded = loaded[split]
    elif split not in (None, "train"):
        raise UserError(f"{key}: {folder} is a single split; save the whole data set, with train and {split}")
    for name in names:
        if name not in loaded.column_names:
            raise UserError(
                f"{key}: {folder} has no column {name!r}; there are: {', '.join(loaded.column_names)}"
            )
    return tuple(loaded[name] for name in names)
