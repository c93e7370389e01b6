"""Hyperplane regression: the paper's sizes, samples that are the same wherever they are read, a known best loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError
from samples import samples_of

from hocket.task import BatchedSamples, loader
from hocket_tasks.hyperplane import Hyperplane, HyperplaneSamples

SMALL = Hyperplane(dimensions=20, train_samples=2000, valid_samples=1000)


def everything(samples: BatchedSamples) -> tuple[torch.Tensor, torch.Tensor]:
    return samples[range(len(samples))]


def test_defaults_are_the_papers_sizes() -> None:
    train, valid = samples_of(HyperplaneSamples, Hyperplane())
    inputs, targets = train[[32767, 0]]
    assert (len(train), len(valid)) == (32768, 4096)
    assert (inputs.shape, targets.shape) == ((2, 8192), (2, 1))
    assert inputs.dtype == targets.dtype == torch.float32
    assert sum(parameter.numel() for parameter in Hyperplane().model().parameters()) == 8193


def test_a_sample_and_a_batch_have_the_shapes_that_a_loader_expects() -> None:
    samples = SMALL.data(seed=0).train
    assert [tensor.shape for tensor in samples[3]] == [(20,), (1,)]
    batch = next(iter(loader(samples, 32)))
    assert [tensor.shape for tensor in batch] == [(32, 20), (32, 1)]


def test_inputs_and_noise_have_the_promised_moments() -> None:
    """Within 5 standard deviations of what is estimated."""
    task = Hyperplane(dimensions=50, train_samples=20_000, noise_variance=2.0)
    inputs, targets = (
        values.double() for values in everything(samples_of(HyperplaneSamples, task, seed=1)[0])
    )
    noise = targets[:, 0] - inputs @ task.coefficients().double()
    assert inputs.abs().max() == 255 / 2048
    assert abs(inputs.mean()) < 5 * (1 / 192 / inputs.numel()) ** 0.5
    assert inputs.var() == pytest.approx(1 / 192, rel=5 * (0.8 / inputs.numel()) ** 0.5)
    assert noise.var() == pytest.approx(2.0, rel=5 * (2 / 20_000) ** 0.5)
    assert abs(noise.mean()) < 5 * (2.0 / 20_000) ** 0.5
    assert noise.pow(4).mean() == pytest.approx(
        3 * 2.0**2, rel=5 * (96 / 9 / 20_000) ** 0.5
    )  # as a normal one's
    # Different dimensions and different samples are uncorrelated.
    for values in (inputs[:200], inputs[:200].T):
        correlation = torch.corrcoef(values) - torch.eye(len(values))
        assert correlation.abs().max() < 6 / values.shape[1] ** 0.5


@given(st.integers(1, 70), st.lists(st.integers(0, 99), max_size=40))
def test_a_sample_has_the_same_bits_in_any_batch(dimensions: int, indices: list[int]) -> None:
    task = Hyperplane(dimensions=dimensions, train_samples=100)
    samples, _ = samples_of(HyperplaneSamples, task, seed=3)
    all_inputs, all_targets = everything(samples)
    inputs, targets = samples[indices]
    assert torch.equal(inputs, all_inputs[indices])
    assert torch.equal(targets, all_targets[indices])
    for row, index in enumerate(indices[:3]):
        assert torch.equal(samples[index][0], inputs[row])
        assert torch.equal(samples[index][1], targets[row])


def test_targets_are_exact() -> None:
    """Without noise they are the plane's, to the last bit: no order of additions can change them."""
    task = Hyperplane(noise_variance=0.0)
    inputs, targets = task.data(seed=0).train[range(64)]
    exact = inputs.numpy().astype(np.float64) @ task.coefficients().numpy().astype(np.float64)
    np.testing.assert_array_equal(targets.numpy()[:, 0], exact)


def test_held_out_samples_are_the_same_in_every_run_and_no_training_samples() -> None:
    (first, valid), (again, _), (other, other_valid) = (
        samples_of(HyperplaneSamples, SMALL, seed) for seed in (0, 0, 1)
    )
    for part in range(2):
        assert torch.equal(everything(first)[part], everything(again)[part])
        assert torch.equal(everything(valid)[part], everything(other_valid)[part])
    inputs = torch.cat([everything(samples)[0] for samples in (first, other, valid)])
    assert len(torch.unique(inputs, dim=0)) == 2000 + 2000 + 1000


def test_shorter_data_are_the_beginning_of_longer_ones() -> None:
    shorter, _ = samples_of(HyperplaneSamples, SMALL, seed=5)
    longer, _ = samples_of(HyperplaneSamples, Hyperplane(dimensions=20, train_samples=3000), seed=5)
    for short, long in zip(everything(shorter), everything(longer), strict=True):
        assert torch.equal(short, long[:2000])


def test_coefficients_are_of_eight_values() -> None:
    values, counts = torch.unique(Hyperplane().coefficients(), return_counts=True)
    assert values.tolist() == [-1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75]
    assert all(abs(count - 1024) < 5 * (8192 * 7 / 64) ** 0.5 for count in counts.tolist())


def test_loss_is_a_mean_and_there_is_no_accuracy() -> None:
    output, target = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]])
    assert SMALL.loss(output, target).item() == 5.0
    assert SMALL.metrics(output, target) == {}


@pytest.mark.parametrize("index", [[0, 100], [-1], 100])
def test_index_out_of_range_raises(index: int | list[int]) -> None:
    with pytest.raises(IndexError):
        Hyperplane(dimensions=3, train_samples=100).data(seed=0).train[index]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "dimensions is 0; allowed: 1 or more"),
        ({"train_samples": 0}, "train_samples is 0; allowed: 1 or more"),
        ({"valid_samples": -1}, "valid_samples is -1; allowed: 1 or more"),
        ({"noise_variance": -0.1}, r"noise_variance is -0\.1; allowed: 0 or more"),
        ({"noise_variance": float("nan")}, "noise_variance is nan; allowed: 0 or more"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hyperplane(**fields)


def test_fields_are_a_config_schema() -> None:
    schema = OmegaConf.structured(Hyperplane)
    assert OmegaConf.to_object(OmegaConf.merge(schema, {"dimensions": 9})) == Hyperplane(dimensions=9)
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"dimensions": "many"})


@pytest.mark.timeout(60)
def test_a_run_on_four_ranks_reaches_the_noise_floor(
    hocket_command: Callable[..., None], tmp_path: Path
) -> None:
    """To within what 30 dimensions and 2,000 samples of noise leave to learn; a regression has no accuracy."""
    task = Hyperplane(dimensions=30, train_samples=2000, noise_variance=0.01)
    fields = [f"task.{name}={value}" for name, value in vars(task).items()]
    hocket_command(
        *("run", "sgd", "task=hyperplane", "transport=virtual", "-n", "4"),
        *(*fields, "epochs=30", "--out", str(tmp_path)),
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    inputs, targets = everything(samples_of(HyperplaneSamples, task)[1])
    floor = task.loss(inputs @ task.coefficients().unsqueeze(1), targets).item()

    assert floor == pytest.approx(0.01, rel=5 * (2 / 4096) ** 0.5)
    assert next(row["valid_loss"] for row in rows if "valid_loss" in row) > 2 * floor
    assert floor < summary["valid_loss"] < 1.1 * floor
    assert summary["valid_loss_ranks"] == [summary["valid_loss"]] * 4
    assert "valid_accuracy" not in {**summary, **rows[-1]}
