"""The received form of quantised or chosen values, in NumPy and from the definitions, to compare compressors with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket_diloco.quantise import Format, Quantise

Values = NDArray[np.float64]


def levels_of(values: Values, compressor: Quantise) -> Values:
    """Return what a group of values arrives as."""
    largest = np.abs(values).max()
    match compressor.format:
        case Format.SIGN:
            signs: Values = np.where(values < 0, -1.0, 1.0)
            return signs * float(np.abs(values).mean())
        case Format.E3M0:
            powers = np.array([0, *(2.0 ** -np.arange(7))]) * largest
            nearest = np.abs(np.abs(values)[:, None] - powers).argmin(1)
            found: Values = np.sign(values) * powers[nearest]
            return found
    levels = {Format.INT8: 256, Format.INT4: 16, Format.INT2: 4}[compressor.format]
    if not compressor.statistical:
        step = largest / (levels // 2 - 1)
        rounded: Values = np.round(values / step) * step
        return rounded
    width = 6 * values.std() / levels or 1.0
    bins = np.clip(np.round((values - values.mean()) / width + levels / 2), 0, levels - 1)
    return np.array([values[bins == each].mean() for each in bins])


def largest_of_chunks(values: NDArray[Any], chunk: int, k: int) -> NDArray[np.intp]:
    """Return the places of the k largest of each chunk, in their order; of a shorter one's as large a share."""
    found = []
    for first in range(0, len(values), chunk):
        own = values[first : first + chunk]
        count = -(-k * len(own) // chunk)
        found.append(first + np.sort(np.argsort(-np.abs(own), kind="stable")[:count]))
    return np.concatenate(found)
