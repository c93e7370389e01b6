"""The account of compressors: what was contributed is what was applied and what is remembered, whatever a loop does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import on_ranks

import hocket
from hocket.session.step import account
from hocket.testing.account import (
    LAYERS,
    WITH_VELOCITY,
    Move,
    Sums,
    check_account,
    for_any_loop,
    play,
    sample,
)
from hocket.testing.session import inner_of

TOPK = {"name": "topk", "density": 0.25}


def feedback(compressor: Any) -> dict[str, Any]:
    return {"name": "error_feedback", "compressor": compressor}


def corrected(compressor: Any) -> dict[str, Any]:
    return {"name": "momentum_correction", "masking": False, "compressor": compressor}


def gradients(collective: Any, compressor: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"collective": collective, "compressor": compressor, "segments": "layers", **fields}]


def in_groups(**fields: Any) -> list[dict[str, Any]]:
    """Return sums within groups, sparse ones among their leaders, and a broadcast."""
    over = {"name": "group", "size": 2}
    return [
        {"collective": "allreduce", "over": over, "segments": "layers"},
        {**gradients("sparse_allreduce", feedback(TOPK), **fields)[0], "over": {**over, "name": "leaders"}},
        {"collective": "broadcast", "over": over, "segments": "layers"},
    ]


EXCHANGES = {
    "gathered": gradients("sparse_allreduce", feedback(TOPK)),
    "scalable": gradients({"name": "sparse_allreduce", "algorithm": "scalable"}, feedback(TOPK)),
    "within backward": gradients("sparse_allreduce", feedback(TOPK), overlap="backward"),
    "drawn": gradients("allreduce", feedback({"name": "shared_random", "density": 0.25})),
    "leaders": in_groups(),
    # Of most layers nothing is sent in a round: their gradients are zero, and nobody has dropped them.
    "few of the model": gradients(
        "sparse_allreduce", feedback({"name": "topk", "density": 0.05}), segments="model"
    ),
    "velocity": gradients("sparse_allreduce", corrected(feedback(TOPK))),
    "velocity within backward": gradients("sparse_allreduce", corrected(feedback(TOPK)), overlap="backward"),
    "gossip": gradients("gossip", "none", topology="ring"),
    "gossip of what is kept back": gradients("gossip", feedback(TOPK), topology="ring"),
}


@pytest.mark.parametrize("name", EXCHANGES)
@for_any_loop
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    """With a velocity that is taken over it is the velocity's: that of SGD with momentum in one process."""
    size = 3 if name in ("leaders", "gossip") else 2
    of_each, velocity = "gossip" not in name, "velocity" in name
    check_account(
        {"gradients": EXCHANGES[name]}, moves, optimizer, velocity=velocity, size=size, of_each=of_each
    )


# ---- states that are too large to be copied in each round -----------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "num_optimizers", "is_copied"),
    [(0, 1, True), (1, 1, False), (3, 2, True), (8, 2, False)],
)
def test_a_first_drop_after_the_first_rounds_leaves_states_as_they_are(
    steps: int,
    num_optimizers: int,
    is_copied: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(account, "_FEW_BYTES", 0)
    monkeypatch.setattr(account, "_FIRST_ROUNDS", 4)

    def run(rank: int) -> None:
        model = Sums()
        parts = [list(model.parameters())[first::num_optimizers] for first in range(num_optimizers)]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        with hocket.attach(model, optimizers, {"gradients": EXCHANGES["gathered"]}) as session:
            phase = inner_of(session).phase
            opened = phase.opened[0]
            assert opened.channel.packing is not None

            def residuals() -> Tensor:
                assert opened.channel.packing is not None
                states = opened.channel.packing.states.values()
                return torch.cat([state.residual for state in states if state.residual is not None])

            def zero_grad() -> None:
                for optimizer in optimizers:
                    optimizer.zero_grad()

            def backward(number: int) -> Tensor:
                zero_grad()
                model(sample(number, rank), range(LAYERS)).backward()
                return residuals()

            before = residuals()
            for number in range(1, steps + 1):
                before = backward(number)
                for optimizer in optimizers:
                    optimizer.step()
            after = backward(steps + 1)
            assert not torch.equal(before, after)
            zero_grad()
            assert phase.gradients is not None
            assert phase.gradients.account is not None
            phase.gradients.account.drop_unused()
            assert torch.equal(residuals(), before if is_copied else after)
            backward(steps + 2)
            zero_grad()
            phase.gradients.account.drop_unused()  # from now on it is taken out
            assert torch.equal(residuals(), before if is_copied else after)

    on_ranks(2, run)
    assert is_copied != any("what compressors kept or what arrives late" in m for m in caplog.messages)


# ---- gradients that are dropped by zeros ----------------------------------------------------------------------------


def by_zero(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.zero_()


def by_data(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.data.zero_()


def by_numpy(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.numpy()[:] = 0


def by_other_memory(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.data = torch.zeros_like(gradient)


def by_another(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = torch.zeros_like(gradient)


Zero = Callable[[nn.Parameter, Tensor], None]


def drop_by_zeros(
    model: Sums,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], list[Tensor]],
    zero: Zero,
    *,
    num_dropped: int,
    first: int,
) -> Tensor:
    """Train, and from step `first` on set gradients of layers to zero before another backward; return the values."""
    for step in range(first + 3):
        if step >= first:
            sum(model(x, range(LAYERS)) for x in batches(50 + step)).backward()
            for parameter in list(model.parameters())[:num_dropped]:
                assert parameter.grad is not None
                zero(parameter, parameter.grad)
        sum(model(x, range(LAYERS)) for x in batches(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach() for parameter in model.parameters()])


@pytest.mark.parametrize("zero", [by_zero, by_data, by_numpy, by_other_memory, by_another])
@pytest.mark.parametrize(("num_dropped", "first"), [(LAYERS, 0), (1, 0), (LAYERS, 6)])
def test_gradients_that_are_set_to_zero_before_another_backward_are_dropped(
    zero: Zero, num_dropped: int, first: int
) -> None:
    """Those of all layers, from the start or after steps of one backward, or of one layer."""
    loop = partial(drop_by_zeros, zero=zero, num_dropped=num_dropped, first=first)
    compressor = corrected(feedback({"name": "topk", "density": 1.0}))

    def run(rank: int) -> Tensor:
        model = Sums()
        [optimizer] = WITH_VELOCITY["plain"](model)
        with hocket.attach(model, optimizer, {"gradients": gradients("sparse_allreduce", compressor)}):
            return loop(model, optimizer, lambda number: [sample(number, rank)])

    model = Sums()
    [optimizer] = WITH_VELOCITY["plain"](model)
    expected = loop(model, optimizer, lambda number: [sample(number, rank) / 2 for rank in range(2)])
    for values in on_ranks(2, run):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_a_change_of_gradients_before_the_step_is_told_where_momentum_was_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, with the parameter and both cures; gradients that nobody touches are not told of."""

    def run(rank: int, clips: bool) -> None:
        model = Sums()
        [optimizer] = WITH_VELOCITY["plain"](model)
        exchanged = gradients("sparse_allreduce", corrected(feedback(TOPK)))
        with hocket.attach(model, optimizer, {"gradients": exchanged}):
            for step in range(3):
                model(sample(step, rank), range(LAYERS)).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(list(model.parameters())[1:], 0.1)
                optimizer.step()
                optimizer.zero_grad()

    on_ranks(2, partial(run, clips=False))
    assert "was changed" not in caplog.text
    on_ranks(2, partial(run, clips=True))
    lines = [record.getMessage() for record in caplog.records if "was changed" in record.getMessage()]
    assert len(lines) == 2
    assert all("p.grad of layers." in line and "layers.0" not in line for line in lines)
    assert all("local_clipping" in line and "compressor=" in line for line in lines)


# ---- momentum that the user saves and loads -------------------------------------------------------------------------


def test_momentum_that_is_loaded_after_attach_is_used_and_saved() -> None:
    moves: list[Move] = [
        ("backward", (0, 1, 2), 1),
        ("step", (), 0),
        ("backward", (0, 1, 2), 2),
        ("step", (), 0),
    ]

    def run(rank: int) -> tuple[Tensor, list[Any]]:
        first = WITH_VELOCITY["plain"](Sums())[0]
        for parameter in first.param_groups[0]["params"]:
            first.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 3.0)
        model = Sums()
        optimizers = WITH_VELOCITY["plain"](model)
        strategy = {
            "gradients": gradients("sparse_allreduce", corrected(feedback({"name": "topk", "density": 1.0})))
        }
        with hocket.attach(model, optimizers, strategy) as session:
            optimizers[0].load_state_dict(first.state_dict())
            assert (optimizers[0].state[next(model.parameters())]["momentum_buffer"] == 3.0).all()
            play(model, optimizers, moves, lambda number: [sample(number, 0)], session.accumulate)
            saved = optimizers[0].state_dict()["state"]
        return -torch.cat([p.detach() for p in model.parameters()]), [
            saved[n]["momentum_buffer"] for n in range(LAYERS)
        ]

    model = Sums()
    [optimizer] = WITH_VELOCITY["plain"](model)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 3.0)
    play(model, [optimizer], moves, lambda number: [sample(number, 0)])
    for own, buffers in on_ranks(2, run):
        torch.testing.assert_close(own, -torch.cat([p.detach() for p in model.parameters()]))
        for buffer, parameter in zip(buffers, model.parameters(), strict=True):
            torch.testing.assert_close(buffer, optimizer.state[parameter]["momentum_buffer"])
