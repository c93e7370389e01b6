from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from samples import samples_of, split_of

from hocket.errors import UserError
from hocket.task import TensorSamples
from hocket_tasks.fashion_mnist import FashionMNIST

INSTALLED = Path(FashionMNIST().folder)
NAMES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]

#: The contents of the files, by name.
Arrays = dict[str, NDArray[np.uint8]]


def write(path: Path, array: NDArray[np.uint8]) -> None:
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def arrays() -> Arrays:
    """Return the contents of a small data set: 20 training samples and 8 held out."""
    random = np.random.default_rng(0)
    train, valid = random.integers(0, 256, (20, 28, 28)), random.integers(0, 256, (8, 28, 28))
    contents = [train, np.arange(20) % 10, valid, np.arange(8)]
    return {name: content.astype(np.uint8) for name, content in zip(NAMES, contents, strict=True)}


@pytest.fixture
def folder(tmp_path: Path, arrays: Arrays) -> Path:
    for name, array in arrays.items():
        write(tmp_path / name, array)
    return tmp_path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reads_the_files_plain_or_compressed(tmp_path: Path, arrays: Arrays, suffix: str) -> None:
    for name, array in arrays.items():
        write(tmp_path / f"{name}{suffix}", array)

    train, valid = samples_of(TensorSamples, FashionMNIST(folder=str(tmp_path)))

    for samples, split in ((train, "train"), (valid, "t10k")):
        pixels, labels = arrays[f"{split}-images-idx3-ubyte"], arrays[f"{split}-labels-idx1-ubyte"]
        inputs, targets = samples[range(len(samples))]
        assert inputs.shape == (len(pixels), 1, 28, 28)
        assert inputs.dtype == torch.float32
        np.testing.assert_allclose(inputs[:, 0], (pixels / 255 - 0.286) / 0.353, rtol=1e-5, atol=1e-6)
        assert targets.dtype == torch.int64
        np.testing.assert_array_equal(targets, labels)


def test_train_samples_are_the_first_and_leave_the_held_out_alone(folder: Path) -> None:
    train, valid = samples_of(TensorSamples, FashionMNIST(folder=str(folder), train_samples=3))
    whole, whole_valid = samples_of(TensorSamples, FashionMNIST(folder=str(folder)), seed=1)

    assert (len(train), len(whole)) == (3, 20)
    assert len(valid) == len(whole_valid) == 8
    for part, all_of_it in zip(train[range(3)], whole[range(3)], strict=True):
        assert torch.equal(part, all_of_it)


def test_missing_folder_says_what_installs_it(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(UserError) as caught:
        FashionMNIST(folder=str(folder)).data(seed=0)

    message = str(caught.value)
    assert f"folder {folder} does not exist" in message
    assert "apt install dataset-fashion-mnist" in message
    assert "task.folder" in message
    assert "torchvision.datasets.FashionMNIST(folder, download=True)" in message
    assert "load_dataset('zalandoresearch/fashion_mnist').save_to_disk(folder)" in message
    assert all(name in message for name in NAMES)


@pytest.mark.parametrize("below", ["FashionMNIST/raw", "raw"])
def test_reads_the_layout_of_torchvision(tmp_path: Path, arrays: Arrays, below: str) -> None:
    (tmp_path / below).mkdir(parents=True)
    for name, array in arrays.items():  # downloaded, and unpacked beside
        write(tmp_path / below / name, array)
        write(tmp_path / below / f"{name}.gz", array)
    train, valid = samples_of(TensorSamples, FashionMNIST(folder=str(tmp_path)))
    assert (len(train), len(valid)) == (20, 8)
    np.testing.assert_array_equal(train.inputs[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(valid.targets, arrays["t10k-labels-idx1-ubyte"])


@pytest.mark.filterwarnings("ignore")  # of the library and of what it uses
def test_reads_what_the_library_datasets_has_saved(tmp_path: Path, arrays: Arrays) -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[*"abcdefghij"])}
    splits, images = {}, {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        pixels, labels = arrays[f"{prefix}-images-idx3-ubyte"], arrays[f"{prefix}-labels-idx1-ubyte"]
        images[split] = [image.fromarray(each) for each in pixels]
        splits[split] = split_of(features, {"image": images[split], "label": labels.tolist()})
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    train, valid = samples_of(TensorSamples, FashionMNIST(folder=str(tmp_path / "saved")))
    for samples, split in ((train, "train"), (valid, "t10k")):
        np.testing.assert_array_equal(samples.inputs[:, 0], arrays[f"{split}-images-idx3-ubyte"])
        np.testing.assert_array_equal(samples.targets, arrays[f"{split}-labels-idx1-ubyte"])
    splits["train"].save_to_disk(tmp_path / "train")
    with pytest.raises(UserError, match="is a single split; save the whole data set, with train and test"):
        FashionMNIST(folder=str(tmp_path / "train")).data(seed=0)
    splits["test"] = split_of({"image": datasets.Image()}, {"image": images["test"]})
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "half")
    with pytest.raises(UserError, match="has no column 'label'; there are: image"):
        FashionMNIST(folder=str(tmp_path / "half")).data(seed=0)


def test_a_saved_folder_without_the_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=r"was written by the library datasets.*pip install .*tasks\[datasets\]'"
    ):
        FashionMNIST(folder=str(tmp_path)).data(seed=0)


def test_missing_file_is_named(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"has no t10k-labels-idx1-ubyte\[\.gz\]"):
        FashionMNIST(folder=str(folder)).data(seed=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", np.zeros((20, 8, 8)), r"images of \(8, 8\) pixels, not \(28, 28\)"),
        (
            "train-images-idx3-ubyte",
            np.zeros((19, 28, 28)),
            "has 19 images, but .*train-labels.* has 20 labels",
        ),
        ("t10k-labels-idx1-ubyte", np.full(8, 10), "label 10; allowed: 0 to 9"),
        ("t10k-labels-idx1-ubyte", np.zeros((8, 1)), "not an IDX file of unsigned bytes with 1 dimension"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    folder: Path, name: str, content: NDArray[np.generic], message: str
) -> None:
    write(folder / name, content.astype(np.uint8))
    with pytest.raises(UserError, match=message) as caught:
        FashionMNIST(folder=str(folder)).data(seed=0)
    assert str(caught.value).startswith(str(folder / name))


def test_more_samples_than_there_are_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"task\.train_samples is 21; allowed: 1 to 20"):
        FashionMNIST(folder=str(folder), train_samples=21).data(seed=0)


def test_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="train_samples is 0; allowed: 1 or more, or null for all"):
        FashionMNIST(train_samples=0)


def test_fields_are_a_config_schema() -> None:
    config = OmegaConf.merge(OmegaConf.structured(FashionMNIST), {"train_samples": 100, "network": "mlp"})
    assert OmegaConf.to_object(config) == FashionMNIST(train_samples=100, network="mlp")


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_installed_data_set_is_as_published() -> None:
    task = FashionMNIST()
    train, valid = samples_of(TensorSamples, task)

    assert (len(train), len(valid)) == (60_000, 10_000)
    assert torch.bincount(train.targets).tolist() == [6000] * 10
    assert torch.bincount(valid.targets).tolist() == [1000] * 10
    inputs, _ = train[range(0, 60_000, 10)]
    assert inputs.mean().item() == pytest.approx(0, abs=0.01)
    assert inputs.std().item() == pytest.approx(1, abs=0.01)
    assert task.model()(inputs[:2]).shape == (2, 10)
