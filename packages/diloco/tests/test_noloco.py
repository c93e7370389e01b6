"""NoLoCo: pairs of ranks with outer parameters of their own, against the NumPy loop and DiLoCo, and what it sends."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from oracle import Family, trained
from pairs import trained_in_pairs
from toys import LAYERS, inner_step, layers_of, on_ranks, start, steps_of, toy_session

import hocket
from hocket.errors import CompositionError
from hocket.outer.api import Outer
from hocket.testing.outer import OuterConformance
from hocket_diloco.noloco import NoLoCo

STEPS, EVERY = 23, 3
SHORT = f"parameters.0.every={EVERY}"


class TestNoLoCo(OuterConformance):
    outers: ClassVar[tuple[Outer, ...]] = (NoLoCo(), NoLoCo(1.0, 0.0, 0.3))


def ended(steps: int = STEPS) -> Any:
    """Train; return this rank's layers, those of the consensus, and the bytes sent."""
    with toy_session(hocket.compose("diloco.noloco", SHORT)) as session:
        steps_of(session, steps)
        own, sent = layers_of(session.model), float(session.counters.bytes_sent)
        with session.consensus():
            return own, layers_of(session.model), sent


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_it_is_that_of_its_definition_and_consensus_the_mean_of_the_ranks_outer_parameters(
    ranks: int,
) -> None:
    theta, phi = trained_in_pairs(start(ranks), STEPS, EVERY, inner_step)
    for rank, (own, shown, _) in enumerate(on_ranks(ranks, ended)):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], theta[layer][rank], rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(shown[layer], phi[layer].mean(0), rtol=1e-11, atol=1e-12)


def test_a_single_pair_is_diloco_with_heavy_momentum() -> None:
    replicas, _ = trained(Family(EVERY, 0.7, 0.5), start(2), STEPS, inner_step)
    for rank, (own, _, _) in enumerate(on_ranks(2, ended)):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], replicas[-1][layer][rank], rtol=1e-11, atol=1e-12)


def test_two_numbers_of_each_parameter_go_to_one_other_rank() -> None:
    elements = sum(-(-size // 8) * 8 for size in LAYERS.values())
    sent = [each[2] for each in on_ranks(4, lambda: ended(4 * EVERY))]
    assert sent == [4 * (2 * elements + 1) * 8] * 4


@pytest.mark.parametrize(
    ("fields", "key", "reason"),
    [
        ({"collective": "allreduce", "topology": None}, "collective", "topology: random_matching"),
        ({"compressor": "fp16"}, "compressor", "uncompressed"),
        ({"over": {"name": "leaders", "size": 2}}, "over", "use world or group"),
    ],
)
def test_outer_parameters_are_mixed_whole_by_gossip_of_all(
    fields: dict[str, Any], key: str, reason: str
) -> None:
    exchange = {"collective": "gossip", "topology": "random_matching", "outer": "diloco.noloco", **fields}
    with pytest.raises(CompositionError, match=rf"(?s)parameters\.0\.{key}: .*{reason}"):
        hocket.compose({"parameters": [exchange]})


@pytest.mark.parametrize("given", [{"lr": 0.0}, {"momentum": 1.0}, {"pull": 1.5}])
def test_what_does_not_step_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} must be"):
        NoLoCo(**given)
