"""The account of an exchange of gradients as a test: contributed = applied + remembered.

It holds whatever a loop does between steps. A plugin's test gets loops, and names the strategy:

    @for_any_loop
    def test_the_account_holds(moves: list[Move], optimizer: str) -> None:
        check_account(strategy, moves, optimizer)

The gradients are the samples themselves, so that one process adds up what an optimizer steps by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hocket
from hocket.plain import TreeView
from hocket.strategy import Strategy
from hocket.testing.session import inner_of

__all__ = [
    "LAYERS",
    "NUMEL",
    "WITH_VELOCITY",
    "Move",
    "Sums",
    "check_account",
    "for_any_loop",
    "play",
    "sample",
]

LAYERS, NUMEL = 3, 8
_LAST = 40

#: One move of a loop: its name, the layers that it uses, and the number of the sample that it takes.
Move = tuple[str, tuple[int, ...], int]

_USED = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(lambda used: tuple(sorted(used)))
_NAMES = ["backward"] * 4 + ["step"] * 4 + ["accumulate", "drop", "zero", "freeze", "thaw", "probe"]

# "zero" is followed by a backward, as nobody steps by zeros.
_MOVES = st.lists(st.tuples(st.sampled_from(_NAMES), _USED, st.integers(0, _LAST)), min_size=4, max_size=14)

_ALL = (0, 1, 2)

# Loops as people write them, by name.
_LOOPS: Mapping[str, list[Move]] = {
    "twice": [
        ("backward", _ALL, 1),
        ("backward", (0, 1), 2),
        ("step", (), 0),
        ("backward", (2,), 3),
        ("step", (), 0),
    ],
    "dropped": [
        ("backward", _ALL, 1),
        ("drop", (), 0),
        ("backward", _ALL, 2),
        ("zero", (), 0),
        ("backward", (1,), 3),
    ],
    "frozen": [
        ("backward", _ALL, 1),
        ("step", (), 0),
        ("freeze", (0,), 0),
        ("backward", _ALL, 2),
        ("step", (), 0),
    ],
    "added and dropped": [
        ("backward", (1,), 5),
        ("accumulate", (1,), 14),
        ("drop", (), 0),
        ("step", (), 0),
    ],
    "added to a sum": [
        ("backward", (0,), 1),
        ("backward", _ALL, 2),
        ("accumulate", (1,), 3),
        ("step", (), 0),
    ],
    "added and zeroed": [
        ("backward", _ALL, 1),
        ("accumulate", (1,), 2),
        ("zero", (0,), 3),
        ("step", (), 0),
    ],
    "added": [("backward", _ALL, 1), ("accumulate", (0, 2), 2), ("probe", _ALL, 3), ("step", (), 0)],
}


class Sums(nn.Module):
    """A model of layers whose gradients are their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(NUMEL, 1, bias=False).double() for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        total: Tensor = sum(self.layers[number](x[number]).sum() for number in used)
        return total


class _RecordingOptimizer(torch.optim.Optimizer):
    """The base of optimizers that add up the gradients by which they step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.taken: dict[Tensor, Tensor] = {}

    def note(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.taken[parameter] = self.taken.get(parameter, 0.0) + parameter.grad


class _Adam(_RecordingOptimizer, torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        self.note()
        return super().step(closure)


class _Nesterov(_RecordingOptimizer, torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.note()
        return super().step(closure)


Optimizers = Callable[[Sums], Sequence[torch.optim.Optimizer]]


def _several(model: Sums) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(others, lr=1.0)]


# Optimizers whose steps are the gradients', or that record them.
_STEPPED_BY: Mapping[str, Optimizers] = {
    "plain": lambda model: [torch.optim.SGD(model.parameters(), lr=1.0)],
    "several": _several,
    "adam": lambda model: [_Adam(model.parameters(), lr=0.1)],
    "nesterov": lambda model: [_Nesterov(model.parameters(), lr=0.1, momentum=0.5, nesterov=True)],
}

#: Optimizers whose momentum a compressor takes over: what is applied and remembered is then velocity.
WITH_VELOCITY: Mapping[str, Optimizers] = {
    "plain": lambda model: [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)],
    "several": _several,
    "nesterov": lambda model: [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, nesterov=True)],
}

# Which optimizers step in which of these loops.
_WRITTEN = (
    ("twice", "nesterov"),
    ("dropped", "plain"),
    ("dropped", "adam"),
    ("frozen", "nesterov"),
    ("added", "several"),
    ("added to a sum", "plain"),
    ("added and dropped", "plain"),
    ("added and zeroed", "plain"),
)

Test = Callable[..., None]


def for_any_loop(test: Test) -> Test:
    """Call a test for each of some loops, with the loop's `moves` and an `optimizer`'s name.

    They are loops that people write, and a few that are drawn; with HOCKET_CELLS=all in the environment many are.
    """
    for name, optimizer in _WRITTEN:
        test = example(moves=_LOOPS[name], optimizer=optimizer)(test)
    drawn = given(moves=_MOVES, optimizer=st.sampled_from(sorted(_STEPPED_BY)))(test)
    count = 50 if os.environ.get("HOCKET_CELLS") == "all" else 3
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=count, deadline=None, derandomize=True, phases=phases)(drawn)


def sample(number: int, rank: int) -> Tensor:
    """Return one of the samples of a rank, [LAYERS, NUMEL]."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(LAYERS, NUMEL, generator=generator, dtype=torch.float64)


def play(
    model: Sums,
    optimizers: Sequence[torch.optim.Optimizer],
    moves: Sequence[Move],
    batches: Callable[[int], Sequence[Tensor]],
    accumulate: Callable[[], AbstractContextManager[None]] = nullcontext,
    before_last: Callable[[], object] = lambda: None,
) -> None:
    """Carry out moves of a loop, which ends with a step; gradients are dropped after each, as most loops do.

    Args:
        model, optimizers: the model, and the optimizers that step it.
        moves: the loop's moves.
        batches: returns the samples of a number, whose losses are added up.
        accumulate: the context in which a backward only adds to gradients.
        before_last: called before the last backward, which reaches all.
    """
    last: list[Move] = [("", (), 0), ("backward", _ALL, 0), ("step", (), 0)]
    for move, used, number in [*moves, *last]:
        trained = [layer for layer in used if model.layers[layer].weight.requires_grad]
        if not move:
            before_last()
        elif move == "drop" or (move == "zero" and trained):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=move == "drop")
        if move in ("backward", "accumulate", "zero") and trained:
            with accumulate() if move == "accumulate" else nullcontext():
                sum(model(x, trained) for x in batches(number)).backward()
        elif move == "probe" and trained:
            loss = sum(model(x, trained) for x in batches(number))
            torch.autograd.grad(loss, list(model.layers[trained[0]].parameters()))
        elif move in ("freeze", "thaw"):
            for layer in used:
                model.layers[layer].weight.requires_grad_(move == "thaw")
                model.layers[layer].weight.grad = None
        elif move == "step":
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def _applied(model: Sums, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
    """Return an optimizer's recorded gradients, or the way of the parameters, float64 [LAYERS, NUMEL]."""
    [first, *_] = optimizers
    if not isinstance(first, _RecordingOptimizer):
        return -torch.cat([p.detach() for p in model.parameters()])
    nothing = torch.zeros(1, NUMEL, dtype=torch.float64)
    return torch.cat([first.taken.get(p, nothing) for p in model.parameters()])


def _run(
    strategy: Strategy | str | TreeView,
    size: int,
    moves: Sequence[Move],
    optimizers_of: Optimizers,
    pace_s: float,
) -> list[tuple[Tensor, Tensor]]:
    """Return for each rank the applied gradients, with what it carries, and the remembered ones.

    Both are float64 [LAYERS, NUMEL].
    """

    def run() -> tuple[Tensor, Tensor]:
        model = Sums()
        optimizers = optimizers_of(model)
        with hocket.attach(model, list(optimizers), strategy) as session:
            rank, peer = session.rank, session.peer
            lane = peer.lane("all have come")

            def batches(number: int) -> list[Tensor]:
                peer.clock.sleep(pace_s * ((number + rank) % size))
                return [sample(number, rank)]

            play(model, optimizers, moves, batches, session.accumulate, lambda: lane.ibarrier().wait())
            lane.ibarrier().wait()
            applied, kept = _applied(model, optimizers), torch.zeros(LAYERS, NUMEL, dtype=torch.float64)
            phase = inner_of(session).phase
            dropped = {} if phase.account is None else phase.account.state_dict()
            for name, carried in dropped.get("carried", {}).items():
                applied[int(name.split(".")[1])] += carried[0]  # as soon as the layer has a gradient
            for name, owed in dropped.get("owed", {}).items():
                kept[int(name.split(".")[1])] -= owed[0]
            for opened in phase.opened:
                share = 1.0 if opened.exchange.collective.traits.sums else 1 / size
                for segment in opened.segments:
                    own = opened.channel.take_stale(segment)
                    if own is None:
                        continue
                    for span in segment.spans:
                        kept[int(span.name.split(".")[1])] += share * own[span.start : span.stop]
            lane.ibarrier().wait()
            lane.close()
        return applied, kept

    return hocket.virtual(size).run(run)


def check_account(
    strategy: Strategy | str | TreeView,
    moves: Sequence[Move],
    optimizer: str,
    *,
    velocity: bool = False,
    size: int = 2,
    of_each: bool = True,
    of_sums: bool = False,
    pace_s: float = 0.0,
) -> None:
    """Play a loop on virtual ranks, and assert that the account holds.

    Args:
        strategy: a strategy with one way to exchange gradients.
        moves: the loop's moves.
        optimizer: its name, as a test of loops gets it.
        velocity: whether a compressor takes over the optimizer's momentum: the account is then the velocity's.
        size: the number of ranks.
        of_each: whether all ranks apply the same gradients; if not, the mean over ranks enters the account.
        of_sums: whether the account holds for each layer's sum alone, as with quantised messages.
        pace_s: seconds by which ranks are late, in turns.
    """
    optimizers_of = _STEPPED_BY[optimizer]
    if velocity:
        optimizers_of = WITH_VELOCITY.get(optimizer, WITH_VELOCITY["plain"])
    ended = _run(strategy, size, moves, optimizers_of, pace_s)
    for own, _ in ended[1:] if of_each else ():
        torch.testing.assert_close(own, ended[0][0], rtol=1e-12, atol=1e-12)
    applied = torch.stack([own for own, _ in ended]).mean(0)
    found = applied + torch.stack([kept for _, kept in ended]).sum(0)

    model = Sums()
    optimizers = optimizers_of(model)
    play(model, optimizers, moves, lambda number: [sample(number, rank) / size for rank in range(size)])
    expected = _applied(model, optimizers)
    if of_sums:
        found, expected = found.sum(1), expected.sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
