"""Layers that are frozen in mid-training under outer optimizers, against a loop in NumPy that leaves them alone.

The gradients are the samples themselves. A layer that no rank has moved since the last merge has no outer gradient: its
outer step is left out, as torch's optimizers leave out parameters without one, and momentum waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from toys import on_ranks

import hocket
from hocket.testing.account import LAYERS, NUMEL, Sums, sample
from hocket.testing.session import inner_of

Values = NDArray[np.float64]

EVERY, STEPS, RATE = 2, 16, 0.1
FROZEN = range(5, 12)  # steps in which the first layer is
NESTEROV = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
HEAVY = {"name": "sgd", "lr": 0.5, "momentum": 0.5}
FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.25}}


@dataclass
class Loop:
    """DiLoCo of layers in NumPy; with a delay and a blend Streaming DiLoCo of one fragment."""

    size: int
    outer: dict[str, Any]
    delay: int = 0
    local: float = 0.0
    everyone: bool = True  # whether all ranks freeze, or the first alone
    history: list[Values] = field(default_factory=list)

    def run(self) -> Values:
        """Return each rank's layers at the end, [size, LAYERS, NUMEL]."""
        theta, phi, u = (np.zeros(shape) for shape in ((self.size, LAYERS, NUMEL), *[(LAYERS, NUMEL)] * 2))
        moved = np.zeros((self.size, LAYERS), dtype=bool)
        come: dict[int, tuple[Values, Any]] = {}
        for step in range(1, STEPS + 1):
            for rank in range(self.size):
                first = int(step in FROZEN and (self.everyone or rank == 0))
                theta[rank, first:] -= RATE * sample(step, rank).numpy()[first:]
                moved[rank, first:] = True
            if self.delay and step in come:
                self.merge(theta, phi, u, *come.pop(step))
                moved[:] = False
            if step % EVERY == 0:
                distances = (phi - theta) * moved[:, :, None]
                come[step + self.delay] = distances.mean(0), moved.any(0)
                if not self.delay:
                    self.merge(theta, phi, u, *come.pop(step))
                    moved[:] = False
            self.history.append(theta.copy())
        return theta

    def merge(self, theta: Values, phi: Values, u: Values, gradient: Values, anywhere: Any) -> None:
        for layer in np.flatnonzero(anywhere):
            u[layer] = self.outer.get("momentum", 0.0) * u[layer] + gradient[layer]
            ahead = gradient[layer] + self.outer.get("momentum", 0.0) * u[layer]
            phi[layer] -= self.outer["lr"] * (ahead if self.outer.get("nesterov") else u[layer])
            theta[:, layer] = self.local * theta[:, layer] + (1 - self.local) * phi[layer]


def train(
    parameters: list[dict[str, Any]],
    rank: int,
    *,
    everyone: bool = True,
    look: Callable[[hocket.Session], object] = lambda _: None,
    **strategy: Any,
) -> list[torch.Tensor]:
    """Return the layers after each step, each [LAYERS, NUMEL]."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    history = []
    with hocket.attach(model, optimizer, {"parameters": parameters, **strategy}) as session:
        for step in range(1, STEPS + 1):
            frozen = step in FROZEN and (everyone or rank == 0)
            model.layers[0].weight.requires_grad_(not frozen)
            optimizer.zero_grad()
            model(sample(step, rank), range(int(frozen), LAYERS)).backward()
            optimizer.step()
            history.append(torch.cat([p.detach().clone() for p in model.parameters()]))
            look(session)
    return history


def exchange(outer: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [{"collective": "allreduce", "every": EVERY, "outer": outer, **fields}]


@pytest.mark.one_of_each
@pytest.mark.parametrize("segments", ["model", "layers"])
@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("outer", [NESTEROV, HEAVY])
def test_an_outer_step_is_that_of_the_layers_that_have_moved(
    outer: dict[str, Any], everyone: bool, segments: str
) -> None:
    """A layer that is frozen on one rank alone moves by the others', as with gradients."""
    expected = Loop(2, outer, everyone=everyone).run()
    ended = on_ranks(2, lambda rank: train(exchange(outer, segments=segments), rank, everyone=everyone))
    for own, at_end in zip(ended, expected, strict=True):
        np.testing.assert_allclose(own[-1].numpy(), at_end, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("local", [0.0, 0.5])
def test_a_blend_leaves_layers_alone_that_have_not_moved(local: float) -> None:
    given = exchange(NESTEROV, delay=1, merge={"name": "blend", "local": local})
    expected = Loop(2, NESTEROV, delay=1, local=local).run()
    ended = on_ranks(2, lambda rank: train(given, rank))
    for own, at_end in zip(ended, expected, strict=True):
        # What was on its way when it froze has come after its second step.
        for later in own[FROZEN[3] : FROZEN[-1]]:
            assert torch.equal(later[0], own[FROZEN[2]][0])
        np.testing.assert_allclose(own[-1].numpy(), at_end, rtol=1e-12, atol=1e-12)


def look_at_mean(session: hocket.Session) -> None:
    with session.consensus():
        pass


DELAYED = exchange(NESTEROV, delay=1, merge={"name": "blend", "local": 0.5})
LOOKED_AT: dict[str, list[dict[str, Any]]] = {
    "a blend": exchange(NESTEROV, merge={"name": "blend", "local": 0.5}),
    "delayed": DELAYED,
    "delayed, kept back": [{**DELAYED[0], "collective": "sparse_allreduce", "compressor": FEEDBACK}],
}


@pytest.mark.parametrize("look", [look_at_mean, hocket.Session.consensus_distance])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_look_moves_no_frozen_layer(name: str, look: Callable[[hocket.Session], object]) -> None:
    """The mean that is looked at is no training, also while an exchange is under way."""
    expected = on_ranks(2, lambda rank: train(LOOKED_AT[name], rank))
    for own, ended in zip(
        on_ranks(2, lambda rank: train(LOOKED_AT[name], rank, look=look)), expected, strict=True
    ):
        assert all(map(torch.equal, own, ended))


def test_a_consensus_to_go_on_from_sends_nothing_of_a_frozen_layer() -> None:
    history = on_ranks(
        2, lambda rank: train(LOOKED_AT["delayed, kept back"], rank, look=hocket.Session.consensus)
    )[0]
    for later in history[FROZEN[3] : FROZEN[-1]]:
        assert torch.equal(later[0], history[FROZEN[2]][0])


OTHERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "kept back": (
        exchange({"name": "sgd", "lr": 1.0}, collective="sparse_allreduce", compressor=FEEDBACK),
        {},
    ),
    "kept back, with momentum": (
        exchange(NESTEROV, collective="sparse_allreduce", compressor=FEEDBACK, segments="layers"),
        {},
    ),
    "displaced": (exchange(NESTEROV, delay=1, merge="add"), {}),
    "two levels": (
        [
            {**exchange(NESTEROV)[0], "over": {"name": "leaders", "size": 2}},
            {"collective": "broadcast", "over": {"name": "group", "size": 2}, "every": EVERY},
        ],
        {"gradients": [{"collective": "allreduce", "over": {"name": "group", "size": 2}}]},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_frozen_layer_stays_where_it_is(name: str) -> None:
    """On every rank, from the merge on that brings what it had moved before; the others go on."""
    parameters, strategy = OTHERS[name]
    for history in on_ranks(4, lambda rank: train(parameters, rank, **strategy)):
        for later in history[FROZEN[3] : FROZEN[-1]]:
            assert torch.equal(later[0], history[FROZEN[2]][0])
            assert not torch.equal(later[1], history[FROZEN[2]][1])
        assert not torch.equal(history[-1][0], history[FROZEN[2]][0])


def test_what_was_kept_back_of_a_frozen_layer_is_sent_when_it_moves_again() -> None:
    """By a rate of 1 outer parameters and residuals together hold all that ranks have moved."""
    [of_exchange], _ = OTHERS["kept back"]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with hocket.attach(model, optimizer, {"parameters": [of_exchange]}) as session:
            for step in range(1, STEPS + 1):
                frozen = step in FROZEN
                model.layers[0].weight.requires_grad_(not frozen)
                optimizer.zero_grad()
                model(sample(step, rank), range(int(frozen), LAYERS)).backward()
                optimizer.step()
            [opened] = inner_of(session).phase.opened
            kept = opened.channel.take_stale(opened.segments[0])
            assert kept is not None
            own = torch.cat([p.detach().clone() for p in model.parameters()])
        return own, kept[: own.numel()].view_as(own) * opened.scale

    expected = torch.zeros(LAYERS, NUMEL, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        for rank in range(2):
            first = int(step in FROZEN)
            expected[first:] -= RATE * sample(step, rank)[first:] / 2
    ended = on_ranks(2, run)
    kept = torch.stack([each for _, each in ended]).sum(0)
    torch.testing.assert_close(ended[0][0] - kept, expected, rtol=1e-12, atol=1e-12)
