"""Strategies made in Python, compressors in lists, and parts of larger configurations: the same as a file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import hocket
from hocket.collective.allreduce import Allreduce
from hocket.errors import CompositionError, ConfigError
from hocket.strategy import Bytes, compose

SPARSE: list[Any] = ["momentum_correction", "error_feedback", {"name": "topk", "density": 0.01}]


def test_compressors_in_a_list_hold_each_other(tmp_path: Path) -> None:
    exchange = {"collective": "sparse_allreduce", "segments": "layers"}
    nested = {"name": "error_feedback", "compressor": SPARSE[-1]}
    expected = compose({"gradients": [{**exchange, "compressor": {"name": SPARSE[0], "compressor": nested}}]})
    given = compose({"gradients": [{**exchange, "compressor": SPARSE}]})
    assert given == expected
    assert hocket.chain(*SPARSE) == expected.gradients[0].compressor
    assert hocket.chain("momentum_correction", hocket.chain(*SPARSE[1:])) == expected.gradients[0].compressor
    path = tmp_path / "sparse.yaml"
    path.write_text(
        "gradients:\n- {collective: sparse_allreduce, segments: layers,\n"
        "   compressor: [momentum_correction, error_feedback, {name: topk, density: 0.5}]}\n"
    )
    assert compose(path, "gradients.0.compressor.2.density=0.01") == expected
    for compressors, message in (
        (
            [SPARSE[-1], "fp16"],
            "gradients.0.compressor.0.name: topk cannot contain a compressor: put topk last",
        ),
        (
            ["error_feedback", "topkk"],
            "gradients.0.compressor.1: there is no compressor 'topkk'. Did you mean 'topk'",
        ),
        (["error_feedback"], "gradients.0.compressor.0.compressor: missing; allowed: bf16, "),
        (
            [{"name": "error_feedback", "decay": 2}, SPARSE[-1]],
            "gradients.0.compressor.0.decay: decay must be above 0",
        ),
        ([], r"gradients.0.compressor: got \[\]; allowed: a compressor by name"),
    ):
        with pytest.raises(ConfigError, match=f"^mapping: {message}"):
            compose({"gradients": [{**exchange, "compressor": compressors}]})
    with pytest.raises(ConfigError, match=r"^hocket.chain: 0.name: topk cannot contain a compressor"):
        hocket.chain(SPARSE[-1], "fp16")


def test_a_strategy_made_in_python_is_that_of_a_file() -> None:
    made = hocket.Strategy(
        gradients=(
            hocket.Exchange("allreduce", over={"name": "group", "size": 2}, overlap="backward"),
            hocket.Exchange(Allreduce(), over={"name": "leaders", "size": 2}, segments=Bytes(8.0, 1.0)),
            hocket.Exchange({"name": "broadcast"}, over={"name": "group", "size": 2}),
        ),
        parameters=(hocket.Exchange("gossip", topology="ring", every=3),),
    )
    groups = [{"name": name, "size": 2} for name in ("group", "leaders", "group")]
    file = {
        "gradients": [
            {"collective": "allreduce", "over": groups[0], "overlap": "backward"},
            {"collective": "allreduce", "over": groups[1]},
            {"collective": "broadcast", "over": groups[2]},
        ],
        "parameters": [{"collective": "gossip", "topology": "ring", "every": 3}],
    }
    assert made == compose(file) == compose(made)
    assert [exchange.name for exchange in made.exchanges] == [
        "gradients.0",
        "gradients.1",
        "gradients.2",
        "parameters.0",
    ]
    assert compose(made, "parameters.0.topology=exponential") == compose(
        file, "parameters.0.topology=exponential"
    )
    later = compose({"recipe": "overlap_sgp", "phases": {"5": {"parameters.0.every": 2}}})
    for recipe in (compose("agd"), compose("dpsgd"), later):
        assert compose(recipe) == recipe
        assert compose(recipe).name == recipe.name
    assert compose(later).phases[-1].strategy.parameters[0].every == 2


def test_a_strategy_made_in_python_passes_the_same_rules() -> None:
    wrong: dict[str, Any] = {"collective": "allreduce", "overlap": "forward"}
    with pytest.raises(CompositionError) as of_file:
        compose({"gradients": [wrong]})
    made = hocket.Strategy(gradients=(hocket.Exchange(**wrong),))
    reason = "gradients cannot be overlapped with forward: use none or backward"
    assert str(of_file.value) == f"mapping: gradients.0.overlap: {reason}"
    model = nn.Linear(2, 2)
    for refuse in (
        lambda: compose(made),
        lambda: hocket.virtual(1).run(
            lambda: hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), made)
        ),
    ):
        with pytest.raises(CompositionError, match=reason):
            refuse()
    for choices, message in (
        ({"overlp": "none"}, r"hocket.Exchange: overlp: unknown key\. Did you mean 'overlap'\? Allowed: "),
        ({"every": 0}, "hocket.Exchange: every: every must be 1 or more, not 0"),
        ({"topology": "rong"}, "hocket.Exchange: topology: there is no topology 'rong'.*Did you mean 'ring'"),
    ):
        with pytest.raises(ConfigError, match=message):
            hocket.Exchange("allreduce", **choices)


def test_a_part_of_a_larger_configuration_is_a_strategy() -> None:
    """As a Hydra application has it: interpolations lead to keys of its own."""
    whole = OmegaConf.create(
        {
            "period": 5,
            "comm": {
                "parameters": [{"collective": "gossip", "topology": "${topology}", "every": "${period}"}]
            },
            "topology": {"name": "ring"},
        }
    )
    expected = compose({"parameters": [{"collective": "gossip", "topology": "ring", "every": 5}]})
    assert compose(whole.comm) == expected
    whole.period = 0
    with pytest.raises(ConfigError, match=r"mapping: parameters\.0\.every: every must be 1 or more, not 0"):
        compose(whole.comm)
    del whole.topology
    with pytest.raises(ConfigError, match=r"mapping: .*Interpolation key 'topology' not found"):
        compose(whole.comm)
