"""`hocket plan` counts the copy that checkpoints beside training are written from: as much as a session then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket.cli.planning import plan_command
from hocket.cli.planning_several import plan_several
from hocket.plan.plan import plan
from hocket.plan.saved import saved_bytes
from hocket.testing.session import inner_of
from hocket.transport.network import NetworkModel

TOPK = (
    "agd",
    "gradients.0.collective=sparse_allreduce",
    "gradients.0.compressor={name: error_feedback, compressor: {name: topk, density: 0.1}}",
)
STRATEGIES = {
    "sgd": ("sgd",),
    "residuals": TOPK,
    "outer": ("periodic_average", "parameters.0.outer={name: sgd, lr: 0.7, momentum: 0.9}"),
    "delay": ("overlap_sgp",),
    "local": ("local",),
}
#: Random states, and what the step's numbers take.
BESIDE = 20_000


def made() -> nn.Module:
    frozen = nn.Linear(50, 200).requires_grad_(False)
    return nn.Sequential(frozen, nn.BatchNorm1d(200), nn.Linear(200, 300), nn.Linear(300, 5))


def optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adam":
        return [torch.optim.AdamW(trained, lr=0.01)]
    return [torch.optim.SGD(trained, lr=0.01, momentum=0.9)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_what_a_session_copies(name: str, optimizer: str, tmp_path: Path) -> None:
    strategy = hocket.compose(*STRATEGIES[name])

    def copied() -> int:
        torch.manual_seed(0)
        model = made()
        [of_model] = optimizers(optimizer, model)
        with hocket.attach(model, of_model, strategy) as session:
            for _ in range(3):
                of_model.zero_grad()
                model(torch.randn(4, 50)).square().mean().backward()
                of_model.step()
            session.save(tmp_path, blocking=False)
            beside = inner_of(session).beside_training
            assert beside is not None
            return beside.copies.nbytes

    with torch.device("meta"):
        empty = made()
    planned = plan(strategy, empty, 2, NetworkModel(latency_s=1e-3, bandwidth_bits_per_s=8e6))
    expected = saved_bytes(planned, empty, lambda model: optimizers(optimizer, model))
    assert all(parameter.grad is None for parameter in empty.parameters())
    most = max(hocket.virtual(2).run(copied))  # rank 0 holds what is frozen
    assert most == pytest.approx(expected, rel=0.01, abs=BESIDE)
    assert expected > 3 * BESIDE


def test_the_plan_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("checkpoint.every=100", "checkpoint.blocking=false", "optimizer={name: adamw}")
    plan_command("sgd", asked, 4)
    shown = capsys.readouterr().out
    [row] = [line for line in shown.splitlines() if line.startswith("checkpoint copy")]
    assert "100 steps" in row
    assert "3.00 x" in row  # the model and two moments
    assert "checkpoint.blocking=false keeps" in " ".join(shown.split())
    plan_command("local", asked, 4)
    assert "checkpoint.blocking=false keeps" in " ".join(capsys.readouterr().out.split())
    plan_several(("sgd", "agd"), asked, 4, ())
    assert "buffers and the copy for checkpoints" in " ".join(capsys.readouterr().out.split())
    for other in (("checkpoint.every=100",), ("checkpoint.blocking=false",)):
        plan_command("sgd", other, 4)
        assert "opy" not in capsys.readouterr().out
