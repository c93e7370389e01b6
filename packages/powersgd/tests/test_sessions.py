"""PowerSGD in training: equal to plain sums at full rank, as a plan says, and refused where it means nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import hocket
from hocket.cli.planning import plan_command
from hocket.cli.planning_several import plan_several
from hocket.compressor.ddp import ddp_comm_hook
from hocket.errors import CompositionError
from hocket.launch.hosts import parse_hosts
from hocket.plan.plan import plan
from hocket.plugin import default_registry
from hocket.testing.account import Move, check_account, for_any_loop
from hocket.testing.memory import held_bytes
from hocket.transport.network import NetworkModel
from hocket_powersgd import PowerSGD

STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)).double()


def train(rank: int, *strategy: str) -> tuple[torch.Tensor, float]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    with hocket.attach(net, optimizer, hocket.compose(*strategy)) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(8, 40, generator=generator, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        with session.consensus():
            return torch.cat(
                [p.detach().reshape(-1) for p in net.parameters()]
            ), session.counters.bytes_sent / STEPS


FULL = "{name: error_feedback, compressor: {name: powersgd, rank: 30, min_saving: 0}}"


@pytest.mark.parametrize(
    ("plain", "low_rank"),
    [
        (("sgd",), ("powersgd", f"gradients.0.compressor={FULL}")),
        (("sgd",), ("powersgd", "gradients.0.segments=layers", f"gradients.0.compressor={FULL}")),
        (
            (
                "periodic_average",
                "parameters.0.every=3",
                "parameters.0.outer={name: sgd, lr: 0.7, momentum: 0.9}",
            ),
            (
                "periodic_average",
                "parameters.0.every=3",
                "parameters.0.outer={name: sgd, lr: 0.7, momentum: 0.9}",
                f"parameters.0.compressor={FULL}",
            ),
        ),
    ],
)
def test_a_run_at_full_rank_is_one_without_it(plain: tuple[str, ...], low_rank: tuple[str, ...]) -> None:
    world = hocket.virtual(3)
    expected = world.run(lambda: train(hocket.join().rank, *plain))
    got = world.run(lambda: train(hocket.join().rank, *low_rank))
    for (left, _), (right, _) in zip(expected, got, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-12)


def test_a_plan_has_the_bytes_of_both_messages() -> None:
    strategy = ("powersgd", "gradients.0.compressor.compressor.rank=2")
    sent = hocket.virtual(4).run(lambda: train(hocket.join().rank, *strategy)[1])
    planned = plan(hocket.compose(*strategy), network(), 4, NetworkModel()).bytes_per_step
    numel = 2 * (40 + 30 + 30 + 20) + 30 + 20  # P and Q of rank 2, biases
    assert sent == pytest.approx([planned] * 4)
    # The trailer has 2 numbers and one for each of the 4 parameters.
    assert planned == pytest.approx(2 * 3 / 4 * 8 * (numel + 2 + 4))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            ("sgd", "gradients.0.compressor={name: powersgd}", "gradients.0.collective=sparse_allreduce"),
            "use allreduce",
        ),
        (
            (
                "sgd",
                "gradients.0.compressor={name: powersgd}",
                "gradients.0.collective={name: allreduce, algorithm: ring}",
            ),
            "algorithm: native",
        ),
        (
            ("periodic_average", "parameters.0.compressor={name: powersgd}"),
            "is too coarse for parameters",
        ),
        (
            (
                "periodic_average",
                "parameters.0.outer={name: sgd, lr: 1}",
                "parameters.0.compressor={name: powersgd}",
            ),
            "error_feedback",
        ),
    ],
)
def test_where_it_means_nothing_it_is_refused(strategy: tuple[str, ...], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        hocket.compose(*strategy)


def test_a_hook_of_ddp_refuses_it() -> None:
    with pytest.raises(ValueError, match="torch's own powerSGD_hook"):
        ddp_comm_hook(PowerSGD())


def test_the_recipe_composes_to_itself_and_tells_its_source() -> None:
    strategy = hocket.compose("powersgd")
    for again in (hocket.compose(strategy.resolved()), hocket.compose(strategy)):
        assert again == strategy
        assert again.name == "powersgd"
        assert again.resolved() == strategy.resolved()
    content = yaml.safe_load(default_registry().recipe_file("powersgd").path.read_text())
    assert content["name"] == "powersgd"
    assert content["description"]
    assert content["source"]


# ---- what a plan says -----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Two dtypes, a frozen parameter, a shared one, and a kernel of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(8, 24, 3)
        self.kernel.weight = nn.Parameter(
            self.kernel.weight.detach().contiguous(memory_format=torch.channels_last)
        )
        self.first = nn.Linear(24, 60)
        self.sixteen = nn.Linear(60, 40, dtype=torch.bfloat16)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last, self.tied = nn.Linear(40, 40), nn.Linear(40, 40)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(self.kernel(x).mean((2, 3)))
        y = self.tied(self.last(self.sixteen(y.bfloat16()).float()))
        return y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, 60)),
    "mixed": (Mixed, (4, 8, 5, 5)),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [3, 4, 6])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_and_memory_are_as_planned(model: str, ranks: int) -> None:
    make, shape = MODELS[model]

    def body() -> tuple[float, int]:
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        with hocket.attach(net, optimizer, "powersgd") as session:
            for _ in range(STEPS):
                optimizer.zero_grad()
                net(torch.ones(shape)).square().mean().backward()
                optimizer.step()
            return session.counters.bytes_sent / STEPS, held_bytes(session)

    planned = plan(hocket.compose("powersgd"), make(), ranks, NetworkModel())
    assert (
        0 < planned.bytes_per_step < plan(hocket.compose("sgd"), make(), ranks, NetworkModel()).bytes_per_step
    )
    for sent, held in hocket.virtual(ranks).run(body):
        assert sent == pytest.approx(planned.bytes_per_step, rel=1e-12)
        assert held == pytest.approx(planned.memory_bytes, rel=0.1)


def test_among_several_its_row_is_that_of_a_plan_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    plan_several(["sgd", "powersgd"], ("task.network=cnn",), None, parse_hosts("2x4"))
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("powersgd ")]
    plan_command("powersgd", ("task.network=cnn",), None, parse_hosts("2x4"))
    [alone] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gradients.0 ")]
    assert re.split(r"  +", alone)[-3:] == re.split(r"  +", row)[-3:]


def test_nothing_of_its_plan_is_cut_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_command("powersgd", (), 8)
    words = {*capsys.readouterr().out.split()}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    plan_command("powersgd", (), 8)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, drawn.splitlines())) <= 80
    assert words <= {*drawn.split()}
    assert "…" not in drawn


# ---- whatever a loop does -------------------------------------------------------------------------------------------

ONE = {"name": "error_feedback", "compressor": {"name": "powersgd", "rank": 1, "min_saving": 0.0}}
EXCHANGES: dict[str, Any] = {
    "factors": ONE,
    "velocity, factors": {"name": "momentum_correction", "masking": False, "compressor": ONE},
}


@pytest.mark.parametrize("name", EXCHANGES)
@for_any_loop
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    """With a velocity that is taken over it is the velocity's: that of SGD with momentum in one process."""
    exchange = {"collective": "allreduce", "compressor": EXCHANGES[name], "segments": "layers"}
    check_account({"gradients": [exchange]}, moves, optimizer, velocity="velocity" in name)


def test_gradients_that_are_kept_stay_as_they_were() -> None:
    """As in gradient surgery, with the gradients of each loss in a list, and across steps."""

    def body() -> bool:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(hocket.join().rank)
        kept: list[Tensor | None] = []
        copies: list[Tensor] = []
        with hocket.attach(net, optimizer, "powersgd"):
            for number in range(STEPS):
                optimizer.zero_grad()
                x = torch.randn(8, 40, generator=generator, dtype=torch.float64)
                F.cross_entropy(net(x), torch.arange(8)).backward()
                kept += [p.grad for p in net.parameters()]
                copies += [p.grad.clone() for p in net.parameters() if p.grad is not None]
                if number % 2:
                    optimizer.step()
        return all(a is not None and torch.equal(a, b) for a, b in zip(kept, copies, strict=True))

    assert hocket.virtual(2).run(body) == [True, True]
