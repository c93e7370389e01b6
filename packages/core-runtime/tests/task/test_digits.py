from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError
from torch.utils.data import Dataset

from hocket.task import Digits, TensorSamples, loader


def everything(samples: Dataset[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(samples, TensorSamples)
    return samples[range(len(samples))]


def test_embedded_file_is_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    with np.load(str(files("hocket.task") / "data" / "digits.npz"), allow_pickle=False) as arrays:
        assert arrays["images"].dtype == arrays["labels"].dtype == np.uint8
        np.testing.assert_array_equal(arrays["images"], digits.data)
        np.testing.assert_array_equal(arrays["labels"], digits.target)


def test_samples_have_the_promised_shape_and_range() -> None:
    data = Digits().data(seed=0)
    inputs, targets = everything(data.train)

    assert inputs.shape == (1442, 1, 8, 8)
    assert inputs.dtype == torch.float32
    assert inputs.min() == pytest.approx(-0.305)
    assert inputs.max() == pytest.approx(0.695)
    assert abs(inputs.mean()) < 0.01
    assert targets.shape == (1442,)
    assert targets.dtype == torch.int64


def test_held_out_is_a_stratified_fifth_and_always_the_same() -> None:
    data = Digits().data(seed=0)
    train, valid = everything(data.train), everything(data.valid)
    again = everything(Digits(network="cnn").data(seed=1).valid)

    assert len(train[1]) + len(valid[1]) == 1797
    assert torch.equal(valid[0], again[0])
    assert torch.equal(valid[1], again[1])
    of_class = torch.bincount(valid[1])
    assert torch.equal(of_class, (of_class + torch.bincount(train[1])) // 5)
    assert valid[1][:12].tolist() == [5, 0, 9, 8, 7, 1, 2, 6, 3, 4, 0, 2]


def test_loss_is_a_mean_and_metrics_are_sums() -> None:
    task = Digits()
    output = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    target = torch.tensor([0, 1, 1])
    expected = -torch.log_softmax(output, dim=1)[range(3), target].mean()

    assert task.loss(output, target).item() == pytest.approx(expected.item())
    assert {name: value.item() for name, value in task.metrics(output, target).items()} == {"accuracy": 2}


def test_label_smoothing_mixes_in_the_mean_over_the_classes() -> None:
    output, target = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    log_probabilities = torch.log_softmax(output, dim=1)
    expected = -(0.9 * log_probabilities[range(4), target] + 0.1 * log_probabilities.mean(dim=1)).mean()

    assert Digits(label_smoothing=0.1).loss(output, target).item() == pytest.approx(expected.item())


def test_fields_are_a_config_schema() -> None:
    schema = OmegaConf.structured(Digits)
    configured = OmegaConf.to_object(OmegaConf.merge(schema, {"hidden": 32, "label_smoothing": 0.1}))

    assert configured == Digits(hidden=32, label_smoothing=0.1)
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"hidden": "many"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": "cnm"}, r"network is 'cnm'\. Did you mean 'cnn'\? Allowed: mlp, cnn, resnet20"),
        ({"hidden": 0}, "hidden is 0; allowed: 1 or more"),
        ({"label_smoothing": 1.0}, r"label_smoothing is 1\.0; allowed: 0 or more, below 1"),
        ({"label_smoothing": -0.1}, r"label_smoothing is -0\.1; allowed"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Digits(**fields)


def test_mlp_learns_to_read() -> None:
    task = Digits()
    data = task.data(seed=0)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = loader(data.train, 32)
    for _ in range(5):
        for inputs, targets in batches:
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()

    inputs, targets = everything(data.valid)
    with torch.no_grad():
        accuracy = task.metrics(model(inputs), targets)["accuracy"] / len(targets)
    assert accuracy > 0.95
