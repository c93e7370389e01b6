"""Steps of a run that are made of several batches, and clipped: the same as of one batch, and as by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from hocket.cli.ranking import run_virtual
from hocket.errors import ConfigError, UserError
from hocket.session.engine import DataParallel
from hocket.task.digits import Digits
from hocket.training.run import build_engine, load_run
from hocket.training.split import split


def train(out: Path, recipe: str, *overrides: str, ranks: int = 2) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the parameters that a run ends with, and its summary."""
    out.mkdir()
    run_virtual(load_run(recipe, [f"ranks={ranks}", *overrides]), out)
    return load_file(out / "model.safetensors"), json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("recipe", ["sgd", "agd", "periodic_average"])
def test_batches_that_add_up_make_the_step_of_one(recipe: str, tmp_path: Path) -> None:
    """Over the end of an epoch, whose last step has 17 samples of each rank: one batch of 16, and one of 1."""
    length = ("steps=25", "optimizer={name: sgd, lr: 0.1}")
    expected, whole = train(tmp_path / "whole", recipe, "batch_size=32", *length)
    given, added_up = train(tmp_path / "added up", recipe, "batch_size=16", "accumulate=2", *length)
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-6)
    # Exchanges count steps of the optimizer: of periodic_average 3 in 25.
    assert added_up["bytes_sent_per_step"] == whole["bytes_sent_per_step"] > 0
    assert added_up["steps"] == 25
    assert added_up["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)


def test_the_optimizer_gets_what_torchs_own_clipping_leaves(tmp_path: Path) -> None:
    """One rank against a loop by hand, whose gradients are far longer than the norm."""
    given, _ = train(tmp_path / "run", "local", "clip_grad_norm=0.1", "accumulate=2", "steps=4", ranks=1)
    read: list[Any] = []
    task = Digits()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, target in batches_of_64(4):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        read.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    assert min(read) > 0.3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-6)


def batches_of_64(num: int) -> list[Any]:
    """Return the first batches that a run with seed 0 reads on one rank."""
    from hocket.task.loading import loader

    found = []
    for batch in loader(Digits().data(0).train, 64, seed=0):
        found.append(batch)
        if len(found) == num:
            break
    return found


def test_a_batch_is_split_by_its_samples() -> None:
    inputs = {"a": torch.arange(10).reshape(5, 2), "b": [torch.arange(5)]}
    parts = split((inputs, torch.arange(5)), 2)
    assert [part[1].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert parts[1][0]["a"].tolist() == [[4, 5], [6, 7]]
    assert parts[2][0]["b"][0].tolist() == [4]


@pytest.mark.parametrize(
    ("inputs", "held"), [(torch.ones(4, 5), r"a tensor \[4, 5\]"), ([torch.ones(5), "text"], "str")]
)
def test_what_cannot_be_split_is_refused(inputs: Any, held: str) -> None:
    with pytest.raises(
        UserError, match=rf"^accumulate: a batch of 5 samples holds {held}, but only tensors "
    ):
        split((inputs, torch.ones(5)), 2)


def test_an_engine_that_steps_by_itself_clips_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run("sgd", ["clip_grad_norm=1.0"])
    monkeypatch.setattr(DataParallel, "clips", "engine.norm")
    said = "clip_grad_norm does not work with engine data_parallel, which steps parts of the model itself"
    with pytest.raises(ConfigError, match=f"^{said}: use engine.norm$"):
        build_engine(run)
