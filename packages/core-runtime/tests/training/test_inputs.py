"""Models with several inputs, samples read by workers, and evaluations within an epoch: the same numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from hocket.cli.ranking import run_virtual
from hocket.errors import ConfigError
from hocket.session.data.batch import call, num_samples
from hocket.task import TaskData
from hocket.task.digits import Digits
from hocket.training.run import load_run


class Halves(nn.Module):
    """The digits' model, of an upper and a lower half of each image; they may come in any order, by name."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, upper: Tensor, lower: Tensor, label: Tensor | None = None) -> Any:
        output = self.whole(torch.cat([upper, lower], dim=2))
        return output if label is None else {"logits": output, "seen": label}


class Changed(Dataset[Any]):
    def __init__(self, samples: Any, change: Callable[[Tensor, Tensor], Any]) -> None:
        self._samples, self._change = samples, change

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._change(*self._samples[index])


@dataclass(frozen=True)
class InOrder(Digits):
    """Inputs in a tuple."""

    @staticmethod
    def change(image: Tensor, label: Tensor) -> Any:
        return (image[:, :4], image[:, 4:]), label

    def data(self, seed: int) -> TaskData:
        data = super().data(seed)
        return TaskData(Changed(data.train, self.change), Changed(data.valid, self.change))

    def model(self) -> nn.Module:
        return Halves(super().model())


@dataclass(frozen=True)
class ByName(InOrder):
    """Inputs in a mapping, in another order than the model's."""

    @staticmethod
    def change(image: Tensor, label: Tensor) -> Any:
        return {"lower": image[:, 4:], "upper": image[:, :4]}, label


@dataclass(frozen=True)
class Whole(InOrder):
    """The whole batch goes to the model by name, and to loss and metrics."""

    @staticmethod
    def change(image: Tensor, label: Tensor) -> Any:
        return {"label": label, "lower": image[:, 4:], "upper": image[:, :4]}

    def loss(self, output: Any, target: Any) -> Tensor:
        assert torch.equal(output["seen"], target["label"])
        return super().loss(output["logits"], target["label"])

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output["logits"], target["label"])


def trained(out: Path, *overrides: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the parameters that a run ends with, without the wrapper's name, and its rows of metrics."""
    out.mkdir()
    run_virtual(load_run("agd", ["ranks=2", "batch_size=64", "epochs=2", *overrides]), out)
    parameters = {n.removeprefix("whole."): p for n, p in load_file(out / "model.safetensors").items()}
    return parameters, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_is_called_with_its_inputs_in_order_or_by_name(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own_tasks", sys.modules[__name__])  # whose own name is no identifier
    expected, rows = trained(tmp_path / "one", f"accumulate={accumulate}")
    for task in ("InOrder", "ByName", "Whole"):
        given, told = trained(tmp_path / task, f"task=own_tasks:{task}", f"accumulate={accumulate}")
        assert all(torch.equal(given[name], value) for name, value in expected.items())
        for row, other in zip(rows, told, strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)
            assert row.get("valid_accuracy") == other.get("valid_accuracy")


class Joined(nn.Module):
    """The halves of one value."""

    def forward(self, halves: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(halves)


def test_a_sequential_gets_its_one_value() -> None:
    halves = (torch.ones(2), torch.zeros(1))
    assert call(nn.Sequential(Joined(), nn.Identity()), halves).tolist() == [1, 1, 0]
    with pytest.raises(TypeError, match="positional argument"):
        call(Joined(), halves)
    assert call(Joined(), {"halves": halves}).tolist() == [1, 1, 0]


def test_samples_count_by_the_targets() -> None:
    ones = torch.ones(3, 2)
    assert num_samples((ones[:1], ones)) == 3
    assert num_samples((ones[:1], ["a", "b"])) == 2
    assert num_samples((ones[:1], {"name": "x", "box": ones})) == 3
    assert num_samples({"box": ones, "name": "x"}) == 3


def test_workers_read_the_same_samples_and_evaluations_change_nothing(tmp_path: Path) -> None:
    expected, rows = trained(tmp_path / "alone")
    given, told = trained(tmp_path / "workers", "num_workers=1", "eval_every=5", "log_every=4")
    assert all(torch.equal(given[name], value) for name, value in expected.items())
    evaluated = [row["step"] for row in told if "valid_loss" in row]
    assert [row["step"] for row in rows if "valid_loss" in row] == [12, 24]
    assert evaluated == [5, 10, 12, 15, 20, 24]
    assert [row["step"] for row in told] == [4, 5, 8, 10, 12, 15, 16, 20, 24]
    for step in (12, 24):
        one, other = (next(row for row in each if row["step"] == step) for each in (rows, told))
        assert one["valid_loss"] == other["valid_loss"]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_workers must be 0 or more, not -1"):
        load_run("sgd", ["num_workers=-1"])
    with pytest.raises(ConfigError, match="eval_every must be 1 or more, not 0"):
        load_run("sgd", ["eval_every=0"])
