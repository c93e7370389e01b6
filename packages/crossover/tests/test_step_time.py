"""Time that segments and fairness save, exact on the virtual clock: computing costs what the test charges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.transport.network import NetworkModel

LAYERS, WIDTH, STEPS, RANKS = 5, 64, 6, 8
FORWARD_S = 0.010
# A layer's message (4,160 floats) takes about 5 ms.
NETWORK = NetworkModel(latency_s=1e-4, bandwidth_bits_per_s=27.2e6)
LAYER_S = NETWORK.message_seconds(4 * (WIDTH * WIDTH + WIDTH))


def exposed_wait_s(recipe: str, *overrides: str) -> list[float]:
    """Return the seconds per step in which each rank waits, in steps that follow another."""

    def train() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: hocket.join().clock.elapse(FORWARD_S))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hocket.attach(model, optimizer, hocket.compose(recipe, *overrides)) as session:
            for number, x in enumerate(session.data([torch.randn(2, WIDTH) for _ in range(STEPS + 2)])):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if number == 1:  # the first forward is watched, and merges all at once
                    begun_s = session.counters.exposed_wait_s
                waited_s = session.counters.exposed_wait_s
                optimizer.step()
            return (waited_s - begun_s) / STEPS

    return hocket.virtual(RANKS, network=NETWORK).run(train)


def test_all_but_the_first_segment_is_hidden_behind_the_forward() -> None:
    """The whole model's message has to be there before the first layer; of segments, the first one's has to."""
    assert LAYER_S < FORWARD_S
    whole = exposed_wait_s("crossover.whole_model")
    sgp = exposed_wait_s("sgp", "parameters.0.segments=model")
    assert whole == pytest.approx([LAYERS * LAYER_S] * RANKS, rel=0.1)
    assert sgp == pytest.approx(whole, rel=0.1)
    assert exposed_wait_s("crossover") == pytest.approx([LAYER_S] * RANKS, rel=0.1)


def test_without_fairness_some_wait_for_who_is_drawn_by_many() -> None:
    fair, unfair = exposed_wait_s("crossover"), exposed_wait_s("crossover.unfair")
    assert min(unfair) > 1.2 * max(fair)


@pytest.mark.parametrize("recipe", ["crossover", "crossover.whole_model"])
def test_one_step_late_nothing_is_exposed(recipe: str) -> None:
    assert exposed_wait_s(recipe, "parameters.0={overlap: none, delay: 1}") == pytest.approx(
        [0] * RANKS, abs=1e-4
    )


def test_sharing_the_lead_shares_the_leaders_link() -> None:
    """Gossip of a group's whole model takes its one leader's link all the time, or each of two members' half of it."""
    settings = ("gradients.0.over.size=2", "parameters.1.overlap=none")
    one = exposed_wait_s("crossover.hierarchical", *settings, "gradients.0.over.sharded=false")
    shares = exposed_wait_s("crossover.hierarchical", *settings)
    # Of half of the model's messages; what the group itself exchanges takes a little longer in shares.
    assert max(one) - max(shares) > 0.6 * 0.5 * LAYERS * LAYER_S
