"""The account of compressors: what was contributed is what was applied and what is remembered, whatever a loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import on_ranks

import hocket
from hocket.session import account
from hocket.testing.account import (
    LAYERS,
    LOOPS,
    MOVES,
    STEPPED_BY,
    WITH_VELOCITY,
    Move,
    Sums,
    check_account,
    play,
    sample,
)

TOPK = {"name": "topk", "density": 0.25}
POWERSGD = {"name": "powersgd", "rank": 1, "min_saving": 0.0}


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
    "factors": gradients("allreduce", feedback(POWERSGD)),
    "leaders": in_groups(),
    "velocity": gradients("sparse_allreduce", corrected(feedback(TOPK))),
    "velocity within backward": gradients("sparse_allreduce", corrected(feedback(TOPK)), overlap="backward"),
    "velocity, factors": gradients("allreduce", corrected(feedback(POWERSGD))),
    "gossip": gradients("gossip", "none", topology="ring"),
    "gossip of what is kept back": gradients("gossip", feedback(TOPK), topology="ring"),
}


@pytest.mark.parametrize("name", EXCHANGES)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@example(LOOPS["twice"], "nesterov")
@example(LOOPS["dropped"], "plain")
@example(LOOPS["dropped"], "adam")
@example(LOOPS["frozen"], "nesterov")
@example(LOOPS["added"], "several")
@example(LOOPS["added to a sum"], "plain")
@example(LOOPS["added and dropped"], "plain")
@example(LOOPS["added and zeroed"], "plain")
@given(moves=MOVES, optimizer=st.sampled_from(sorted(STEPPED_BY)))
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    """With a velocity that is taken over it is the velocity's: that of SGD with momentum in one process."""
    size = 3 if name in ("leaders", "gossip") else 2
    optimizers_of = STEPPED_BY[optimizer]
    if "velocity" in name:
        optimizers_of = WITH_VELOCITY.get(optimizer, WITH_VELOCITY["plain"])
    exchanged = {"gradients": EXCHANGES[name]}
    check_account(exchanged, moves, optimizers_of, size=size, of_each="gossip" not in name)


# ---- states that are too large to be copied in each round -----------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 8])
def test_a_first_drop_after_the_first_rounds_leaves_states_as_they_are(
    steps: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(account, "_FEW_BYTES", 0)
    monkeypatch.setattr(account, "_FIRST_ROUNDS", 4)
    is_copied = steps < 4

    def run(rank: int) -> None:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, {"gradients": EXCHANGES["gathered"]}) as session:
            opened = session.phase.opened[0]
            assert opened.channel.packing is not None

            def residuals() -> Tensor:
                assert opened.channel.packing is not None
                states = opened.channel.packing.states.values()
                return torch.cat([state.residual for state in states if state.residual is not None])

            def backward(number: int) -> Tensor:
                optimizer.zero_grad()
                model(sample(number, rank), range(LAYERS)).backward()
                return residuals()

            for number in range(1, steps + 1):
                before = backward(number)
                optimizer.step()
            after = backward(steps + 1)
            assert not torch.equal(before, after)
            optimizer.zero_grad()
            assert session.phase.gradients is not None
            assert session.phase.gradients.account is not None
            session.phase.gradients.account.drop_unused()
            assert torch.equal(residuals(), before if is_copied else after)
            backward(steps + 2)
            optimizer.zero_grad()
            session.phase.gradients.account.drop_unused()  # from now on it is taken out
            assert torch.equal(residuals(), before if is_copied else after)

    on_ranks(2, run)
    assert is_copied != any("the part that compressors kept is applied later" in m for m in caplog.messages)


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
