"""Metrics of a task: all are kept, and those of several ranks are those of all samples together."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from hocket.cli.main import main
from hocket.task import Digits

#: 355 held-out digits are one fewer for the last of four ranks.
SOURCE = """
    import dataclasses

    import torch
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

    from hocket.task import Digits, TaskData

    SHARED = MulticlassF1Score(10)  # ranks that are threads do not get in each other's way


    @dataclasses.dataclass(frozen=True)
    class Judged(Digits):
        held_out: int = 355

        def data(self, seed):
            given = super().data(seed)
            return TaskData(given.train, torch.utils.data.Subset(given.valid, range(self.held_out)))

        def metrics(self, output, target):
            confidence = output.softmax(1).amax(1).sum()
            return {**super().metrics(output, target), "confidence": confidence}

        def torchmetrics(self):
            return {"f1": SHARED, "auroc": MulticlassAUROC(10), "recalls": MulticlassAccuracy(10, average=None)}


    class Together(Judged):
        def torchmetrics(self):
            return MetricCollection([MulticlassF1Score(10), MulticlassAUROC(10)], prefix="of_")


    class Loss(Judged):
        def torchmetrics(self):
            return {"loss": SHARED}


    class Twice(Judged):
        def torchmetrics(self):
            return {"confidence": SHARED}


    class Single(Judged):
        def torchmetrics(self):
            return SHARED


    class Number(Judged):
        def torchmetrics(self):
            return {"f1": 0.5}


    class Bare(Judged):
        def metrics(self, output, target):
            return output.sum()


    class Wide(Judged):
        def metrics(self, output, target):
            return {"wide": output.sum(0)}
"""


@pytest.fixture
def hocket_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that carries out `hocket run` here, and returns its exit status."""
    (tmp_path / "judged.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "judged", raising=False)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(
            sys, "argv", ["hocket", "run", *arguments, "--transport", "virtual", "--out", "out"]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run


def logits_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    """What the run's consensus says of all held-out digits, and what is right."""
    task = Digits()
    model = task.model()
    model.load_state_dict(load_file("out/model.safetensors"))
    valid: Any = task.data(0).valid
    inputs, targets = valid[list(range(len(valid)))]
    with torch.no_grad():
        return model.eval()(inputs), targets


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


def test_metrics_of_ranks_are_those_of_all_samples(
    hocket_run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert hocket_run("dpsgd", "-n", "4", "task=judged:Judged", "epochs=2") == 0
    output, targets = logits_and_targets()
    summary = json.loads(Path("out/summary.json").read_text())
    expected = {
        "valid_f1": float(MulticlassF1Score(10)(output, targets)),
        "valid_auroc": float(MulticlassAUROC(10)(output, targets)),
        "valid_confidence": float(output.softmax(1).amax(1).mean()),
        "valid_accuracy": float((output.argmax(1) == targets).float().mean()),
    }
    for name, value in expected.items():
        assert summary[name] == rows()[-1][name] == pytest.approx(value, abs=1e-5)
        assert len(set(summary[f"{name}_ranks"])) > 1
    assert f"f1 {expected['valid_f1']:.4f}, auroc" in capfd.readouterr().out
    of_classes = [(output.argmax(1) == targets)[targets == each].float().mean() for each in range(10)]
    assert summary["valid_recalls"] == pytest.approx([float(each) for each in of_classes], abs=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics: too few samples for a curve
def test_a_collection_and_a_rank_without_samples(hocket_run: Callable[..., int]) -> None:
    assert hocket_run("sgd", "-n", "3", "task=judged:Together", "task.held_out=2", "steps=3") == 0
    output, targets = (each[:2] for each in logits_and_targets())
    expected = float(MulticlassF1Score(10)(output, targets))
    assert rows()[-1]["valid_of_MulticlassF1Score"] == pytest.approx(expected)
    assert "valid_of_MulticlassAUROC" in rows()[-1]


def test_the_ranks_spread(hocket_run: Callable[..., int]) -> None:
    late = "delays={name: fixed, ranks: [1], seconds: 0.3}"
    assert hocket_run("sgd", "-n", "3", "steps=5", "log_every=1", "compute={step_s: 0.1}", late) == 0
    last, summary = rows()[-1], json.loads(Path("out/summary.json").read_text())
    assert last["train_loss_min"] < last["train_loss"] < last["train_loss_max"]
    assert last["wait_share_min"] < 0.1
    assert last["wait_share_max"] == pytest.approx(0.3 / 0.4, abs=0.01)
    first, second, third = summary["exposed_wait_fraction_ranks"]
    assert second < 0.1
    assert 0.7 < first == pytest.approx(third, abs=0.01)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("Loss", "torchmetrics() of task Loss: a metric is named 'loss', the name of the task's loss"),
        ("Twice", "metrics() of task Twice: 'confidence' is one of its torchmetrics objects already"),
        (
            "Single",
            "torchmetrics() of task Single returned MulticlassF1Score(); allowed: torchmetrics objects",
        ),
        ("Number", "torchmetrics() of task Number: 'f1' is 0.5; allowed: a torchmetrics object"),
        ("Bare", "metrics() of task Bare returned Tensor; allowed: a mapping of names to numbers"),
        ("Wide", "metrics() of task Wide: 'wide' is Tensor of shape [10]; allowed: one number, the sum over"),
    ],
)
def test_mistakes(
    task: str, expected: str, hocket_run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert hocket_run("sgd", f"task=judged:{task}", "steps=1") == 2
    assert expected in capfd.readouterr().err
    assert not Path("out/metrics.jsonl").exists()  # before it has trained
