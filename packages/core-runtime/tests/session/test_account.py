"""The account of compressors: what was contributed is what was applied and what is remembered, whatever a loop does.

The gradients are the samples themselves, so that one process adds up what an optimizer steps by.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import on_ranks

import hocket

LAYERS, NUMEL, LAST = 3, 8, 40
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
}


class Sums(nn.Module):
    """Layers whose gradients are what each is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(NUMEL, 1, bias=False).double() for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        total: Tensor = sum(self.layers[number](x[number]).sum() for number in used)
        return total


#: Moves of a loop; "zero" is followed by a backward, as nobody steps by zeros. Layers are numbers; what is drawn with
#: a move says which sample it takes.
Move = tuple[str, tuple[int, ...], int]
USED = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(lambda used: tuple(sorted(used)))
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["backward"] * 4 + ["step"] * 4 + ["accumulate", "drop", "zero", "freeze", "thaw", "probe"]
        ),
        USED,
        st.integers(0, LAST),
    ),
    min_size=4,
    max_size=14,
)


def sample(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(LAYERS, NUMEL, generator=generator, dtype=torch.float64)


def play(
    model: Sums,
    optimizers: Sequence[torch.optim.Optimizer],
    moves: Sequence[Move],
    batches: Any,
    accumulate: Any,
) -> None:
    """Carry out moves of a loop, which ends with a step; gradients are dropped after each, as most loops do."""
    for move, used, number in [*moves, ("backward", (0, 1, 2), 0), ("step", (), 0)]:
        trained = [layer for layer in used if model.layers[layer].weight.requires_grad]
        if move == "drop" or (move == "zero" and trained):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=move == "drop")
        if move in ("backward", "accumulate", "zero") and trained:
            with accumulate() if move == "accumulate" else nullcontext():
                sum(model(x, trained) for x in batches(number)).backward()
        elif move == "probe" and trained:
            torch.autograd.grad(
                sum(model(x, trained) for x in batches(number)), list(model.layers[trained[0]].parameters())
            )
        elif move in ("freeze", "thaw"):
            for layer in used:
                model.layers[layer].weight.requires_grad_(move == "thaw")
                model.layers[layer].weight.grad = None
        elif move == "step":
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def applied_and_kept(
    strategy: Any, size: int, moves: Sequence[Move], optimizers_of: Any
) -> tuple[Tensor, Tensor]:
    """Return how far the first rank's parameters have come, and what all ranks keep back."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = Sums()
        optimizers = optimizers_of(model)
        with hocket.attach(model, optimizers, strategy) as session:
            play(model, optimizers, moves, lambda number: [sample(number, rank)], session.accumulate)
            kept = torch.zeros(LAYERS, NUMEL, dtype=torch.float64)
            for opened in session.phase.opened:
                states = {} if opened.channel.packing is None else opened.channel.packing.states
                for segment in opened.segments:
                    residual = None if segment.index not in states else states[segment.index].residual
                    if residual is None:
                        continue
                    for span in segment.spans:
                        kept[int(span.name.split(".")[1])] += residual[span.start : span.stop]
        return -torch.cat([p.detach() for p in model.parameters()]), kept

    ended = on_ranks(size, run)
    for own, _ in ended[1:]:
        assert torch.equal(own, ended[0][0])
    return ended[0][0], torch.stack([kept for _, kept in ended]).sum(0)


def plain(size: int, moves: Sequence[Move], optimizers_of: Any) -> Tensor:
    model = Sums()
    optimizers = optimizers_of(model)
    play(
        model,
        optimizers,
        moves,
        lambda number: [sample(number, rank) / size for rank in range(size)],
        nullcontext,
    )
    return -torch.cat([p.detach() for p in model.parameters()])


def one(model: Sums) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1.0)]


def with_momentum(model: Sums) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)]


def with_nesterov(model: Sums) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, nesterov=True)]


def several(model: Sums) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=1.0)]


ALL = (0, 1, 2)
TWICE = [
    ("backward", ALL, 1),
    ("backward", (0, 1), 2),
    ("step", (), 0),
    ("backward", (2,), 3),
    ("step", (), 0),
]
DROPPED = [
    ("backward", ALL, 1),
    ("drop", (), 0),
    ("backward", ALL, 2),
    ("zero", (), 0),
    ("backward", (1,), 3),
]
FROZEN = [("backward", ALL, 1), ("step", (), 0), ("freeze", (0,), 0), ("backward", ALL, 2), ("step", (), 0)]
ADDED = [("backward", ALL, 1), ("accumulate", (0, 2), 2), ("probe", ALL, 3), ("step", (), 0)]


@pytest.mark.parametrize("name", EXCHANGES)
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(TWICE, "nesterov")
@example(DROPPED, "momentum")
@example(FROZEN, "nesterov")
@example(ADDED, "several")
@given(moves=MOVES, optimizer=st.sampled_from(["momentum", "nesterov", "several"]))
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    """With a velocity that is taken over it is the velocity's: that of SGD with momentum in one process."""
    size = 3 if name == "leaders" else 2
    taken_over = {"momentum": with_momentum, "nesterov": with_nesterov, "several": several}[optimizer]
    optimizers_of = taken_over if "velocity" in name or optimizer == "several" else one
    applied, kept = applied_and_kept({"gradients": EXCHANGES[name]}, size, moves, optimizers_of)
    torch.testing.assert_close(applied + kept, plain(size, moves, optimizers_of), rtol=1e-10, atol=1e-10)


# ---- momentum that the user saves and loads -------------------------------------------------------------------------


def test_momentum_that_is_loaded_after_attach_is_used_and_saved() -> None:
    moves: list[Move] = [("backward", ALL, 1), ("step", (), 0), ("backward", ALL, 2), ("step", (), 0)]

    def run(rank: int) -> tuple[Tensor, list[Any]]:
        first = with_momentum(Sums())[0]
        for parameter in first.param_groups[0]["params"]:
            first.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 3.0)
        model = Sums()
        optimizers = with_momentum(model)
        strategy = {
            "gradients": gradients("sparse_allreduce", corrected(feedback({"name": "topk", "density": 1.0})))
        }
        with hocket.attach(model, optimizers, strategy) as session:
            optimizers[0].load_state_dict(first.state_dict())
            assert "momentum_buffer" not in optimizers[0].state[next(model.parameters())]
            play(model, optimizers, moves, lambda number: [sample(number, 0)], session.accumulate)
            saved = optimizers[0].state_dict()["state"]
        return -torch.cat([p.detach() for p in model.parameters()]), [
            saved[n]["momentum_buffer"] for n in range(LAYERS)
        ]

    model = Sums()
    [optimizer] = with_momentum(model)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 3.0)
    play(model, [optimizer], moves, lambda number: [sample(number, 0)], nullcontext)
    for own, buffers in on_ranks(2, run):
        torch.testing.assert_close(own, -torch.cat([p.detach() for p in model.parameters()]))
        for buffer, parameter in zip(buffers, model.parameters(), strict=True):
            torch.testing.assert_close(buffer, optimizer.state[parameter]["momentum_buffer"])
