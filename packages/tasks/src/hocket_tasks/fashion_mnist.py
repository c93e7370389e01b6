"""Fashion-MNIST: 70 000 images of clothes, read from a folder.

Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms", arXiv:1708.07747.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.api import ImageClassification, Scaling, TaskData, TensorSamples
from hocket.errors import UserError
from hocket_tasks.idx import read_idx
from hocket_tasks.saved_datasets import columns_of, is_saved

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "valid": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

# The place below its root folder in which torchvision keeps them.
_TORCHVISION = Path("FashionMNIST", "raw")

#: uint8, of images or of their classes.
Pixels = NDArray[np.uint8]

#: Mean and standard deviation of the training images' pixels.
_SCALING = Scaling(offset=0.2860 * 255, divisor=0.3530 * 255)


@dataclass(frozen=True)
class FashionMNIST(ImageClassification):
    """Inputs float32 [1, 28, 28] of zero mean and unit variance, targets int64 from 0 to 9.

    The data set's own test split (10 000 samples) is held out. Files of the same names and shapes, such as
    MNIST's, do as well.

    Attributes:
        folder: the folder with the four IDX files, plain or as `.gz`, or with `FashionMNIST/raw`, as torchvision writes
            it; or a data set that the library datasets has saved to disk, with splits train and test.
        train_samples: the number of samples to train with, the first in the file's (shuffled) order; null for
            all.
    """

    network: str = "cnn"
    folder: str = "/usr/share/datasets/fashion-mnist"
    train_samples: int | None = None

    input_shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    num_classes: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_samples is not None and self.train_samples < 1:
            raise ValueError(f"train_samples is {self.train_samples}; allowed: 1 or more, or null for all")

    def data(self, seed: int) -> TaskData:
        folder = Path(self.folder).expanduser().absolute()
        train = _read_split(folder, "train")
        if self.train_samples is not None:
            if self.train_samples > len(train):
                raise UserError(
                    f"task.train_samples is {self.train_samples}; allowed: 1 to {len(train)}, "
                    f"the number of training samples in {folder}"
                )
            count = self.train_samples
            train = TensorSamples(train.inputs[:count], train.targets[:count], train.scaling)
        return TaskData(train=train, valid=_read_split(folder, "valid"))


@lru_cache(maxsize=len(_FILES))  # the virtual ranks of one process share one copy of the 55 MB
def _read_split(folder: Path, split: str) -> TensorSamples:
    """Read the images and labels of a split ("train" or "valid").

    Raises:
        UserError: a file is missing, damaged or does not fit the other one.
    """
    images_path, images, labels_path, labels = (
        _read_saved(folder, split) if is_saved(folder) else _read_files(folder, split)
    )
    if images.shape[1:] != FashionMNIST.input_shape[1:]:
        raise UserError(f"{images_path}: images of {images.shape[1:]} pixels, not (28, 28)")
    if len(images) != len(labels):
        raise UserError(
            f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels: install the data "
            "set again"
        )
    if labels.max(initial=0) >= FashionMNIST.num_classes:
        raise UserError(f"{labels_path}: label {labels.max()}; allowed: 0 to {FashionMNIST.num_classes - 1}")
    inputs = torch.from_numpy(images).unsqueeze(1)
    return TensorSamples(inputs, torch.from_numpy(labels.astype(np.int64)), _SCALING)


def _read_files(folder: Path, split: str) -> tuple[Path, Pixels, Path, Pixels]:
    images_path, labels_path = (_find(folder, name) for name in _FILES[split])
    return images_path, read_idx(images_path, num_dims=3), labels_path, read_idx(labels_path, num_dims=1)


def _read_saved(folder: Path, split: str) -> tuple[Path, Pixels, Path, Pixels]:
    name = {"train": "train", "valid": "test"}[split]
    images, labels = columns_of(folder, "task.folder", name, ("image", "label"))
    try:
        pixels = np.stack([np.asarray(image, dtype=np.uint8) for image in images])
        classes = np.asarray(list(labels), dtype=np.uint8)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"task.folder: split {name!r} of {folder} holds no gray images with labels: {error}"
        ) from error
    return folder / name, pixels, folder / name, classes


def _find(folder: Path, name: str) -> Path:
    for place in (folder, folder / "raw", folder / _TORCHVISION):
        for path in (place / f"{name}.gz", place / name):
            if path.is_file():
                return path
    wanted = ", ".join(file for names in _FILES.values() for file in names)
    found = f"has no {name}[.gz]" if folder.is_dir() else "does not exist"
    raise UserError(
        f"task.folder: the folder {folder} {found}. Fashion-MNIST is read from the files {wanted} "
        "(each with .gz or plain). Install them with `apt install dataset-fashion-mnist`, or set task.folder to a "
        "folder that has them, to one for which torchvision.datasets.FashionMNIST(folder, download=True) was called, "
        "or to one that datasets.load_dataset('zalandoresearch/fashion_mnist').save_to_disk(folder) has written."
    )
