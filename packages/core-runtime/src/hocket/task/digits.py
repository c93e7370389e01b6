"""Hand-written digits of 8 x 8 pixels, shipped with core: trains in seconds, needs no download.

Source: the test set of Optical Recognition of Handwritten Digits (UCI), as scikit-learn distributes it; see
`data/NOTICE.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.arrays import Array
from hocket.task.api import TaskData
from hocket.task.classification import ImageClassification
from hocket.task.samples import Scaling, TensorSamples

#: The mean pixel becomes zero, and the pixels' range, 0 to 16, has length one.
_SCALING = Scaling(offset=4.88, divisor=16.0)

_HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Digits(ImageClassification):
    """1797 digits: inputs float32 [1, 8, 8] from -0.305 to 0.695, targets int64 from 0 to 9.

    Held out is every fifth sample of each class, in the order of the file: 355 samples, as many of each class
    as its share, without a random draw that another version of NumPy could change.
    """

    input_shape: ClassVar[tuple[int, int, int]] = (1, 8, 8)
    num_classes: ClassVar[int] = 10

    def data(self, seed: int) -> TaskData:
        with (files("hocket.task") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        inputs = torch.from_numpy(images).reshape(-1, *self.input_shape)
        targets = torch.from_numpy(labels.astype(np.int64))
        held_out = torch.from_numpy(_held_out(labels))
        return TaskData(
            train=TensorSamples(inputs[~held_out], targets[~held_out], _SCALING),
            valid=TensorSamples(inputs[held_out], targets[held_out], _SCALING),
        )


def _held_out(labels: Array) -> NDArray[np.bool_]:
    """Return which samples are held out, [num_samples], for their classes, [num_samples]."""
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        of_label = np.flatnonzero(labels == label)
        held_out[of_label[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]] = True
    return held_out
