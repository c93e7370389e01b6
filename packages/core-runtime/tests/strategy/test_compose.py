"""Composition: the same strategy from a recipe, a file and a mapping, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import hocket
from hocket.collective.allreduce import Allreduce
from hocket.collective.api import CollectiveTraits, Ends
from hocket.collective.rooted import Broadcast
from hocket.errors import CompositionError, ConfigError
from hocket.plugin import default_registry
from hocket.strategy import Bytes, Exchange, Layers, Leaders, Overlap, Placement, Strategy, World, compose
from hocket.topology import Complete
from hocket.training.run import load_run

RECIPES = (
    "agd",
    "dpsgd",
    "hierarchical_sgd",
    "local",
    "overlap_sgp",
    "periodic_average",
    "sgd",
    "sgp",
)

AGD: dict[str, Any] = {"gradients": [{"collective": "allreduce", "overlap": "backward"}]}


def test_sgd_is_a_world_allreduce_of_the_gradients() -> None:
    strategy = compose("sgd")
    exchange = Exchange(Allreduce(), World(), None, None, Bytes(), 1, Overlap.NONE, slot="gradients", index=0)
    assert strategy == Strategy("sgd", gradients=(exchange,))
    assert strategy.name == "sgd"
    assert strategy.gradients[0].name == "gradients.0"
    assert strategy.exchanges == (exchange,)


def test_a_recipe_a_file_and_a_mapping_compose_equally(tmp_path: Path) -> None:
    bare, whole, based = (tmp_path / name for name in ("bare.yaml", "whole.yml", "based.yaml"))
    bare.write_text(yaml.safe_dump(AGD))
    whole.write_text(yaml.safe_dump({"epochs": 3, "strategy": AGD}))
    based.write_text("recipe: agd\n")
    expected = compose("agd")
    targets: list[Any] = [AGD, {"strategy": AGD}, OmegaConf.create(AGD), bare, str(bare), whole, based]
    assert [compose(target) for target in targets] == [expected] * len(targets)
    assert compose(AGD).name is None


def test_without_a_strategy_it_is_the_default_recipe() -> None:
    assert compose({}) == compose("sgd")


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_resolved_composes_to_the_same(recipe: str) -> None:
    strategy = compose(recipe)
    again = compose(strategy.resolved())
    assert again == strategy
    assert again.name == recipe
    assert again.resolved() == strategy.resolved()


def test_core_has_the_recipes_and_each_tells_its_source() -> None:
    files = default_registry().recipes()
    assert tuple(file.name for file in files) == RECIPES
    for file in files:
        content = yaml.safe_load(file.path.read_text())
        assert content["name"] == file.name
        assert content["description"]
        assert content["source"]


_EXCHANGES = st.fixed_dictionaries(
    {
        "collective": st.one_of(
            st.sampled_from(["allreduce", "broadcast", {"name": "allreduce"}]),
            st.builds(lambda root: {"name": "broadcast", "root": root}, st.integers(0, 10**6)),
        )
    },
    optional={
        "over": st.sampled_from(["world", {"name": "world"}]),
        "compressor": st.just("none"),
        "topology": st.none(),
        "every": st.integers(1, 10**9),
        "overlap": st.sampled_from(["none", "forward"]),
        "segments": st.one_of(
            st.sampled_from(["model", "layers", "bytes"]),
            st.builds(
                lambda size: {"name": "bytes", "size_mb": size},
                st.floats(min_value=0, exclude_min=True, allow_infinity=False),
            ),
        ),
    },
)


@given(st.lists(_EXCHANGES, max_size=4))
def test_any_parameter_exchanges_survive_the_round_trip(exchanges: list[dict[str, Any]]) -> None:
    for exchange in exchanges[:-1]:
        exchange.pop("overlap", None)  # only the last one may
    strategy = compose({"parameters": exchanges})
    assert [exchange.index for exchange in strategy.parameters] == list(range(len(exchanges)))
    assert compose(strategy.resolved()) == strategy
    assert compose({"parameters": strategy.resolved()["parameters"]}) == strategy


@given(every=st.integers(1, 10**6), size_mb=st.integers(1, 10**6))
def test_overrides_say_the_same_as_the_mapping(every: int, size_mb: int) -> None:
    mapping = {
        "parameters": [
            {"collective": "allreduce", "every": every, "segments": {"name": "bytes", "size_mb": size_mb}}
        ]
    }
    overrides = ["parameters.0.segments=bytes", f"parameters.0.segments.size_mb={size_mb}"]
    assert compose("periodic_average", f"parameters.0.every={every}", *overrides) == compose(mapping)


def test_an_override_by_name_replaces_the_component_with_its_fields() -> None:
    target = {
        "parameters": [
            {"collective": {"name": "broadcast", "root": 3}, "segments": {"name": "bytes", "size_mb": 1}}
        ]
    }
    strategy = compose(target, "parameters.0.collective=broadcast", "strategy.parameters.0.segments=layers")
    assert strategy.parameters[0].collective == Broadcast()
    assert strategy.parameters[0].segments == Layers()


def test_an_override_below_a_name_adds_a_field_to_it() -> None:
    target = {"parameters": [{"collective": "broadcast", "segments": "bytes"}]}
    strategy = compose(target, "parameters.0.collective.root=2", "parameters.0.segments.size_mb=1.5")
    assert strategy.parameters[0].collective == Broadcast(root=2)
    assert strategy.parameters[0].segments == Bytes(1.5)


def test_overrides_are_laid_in_order_and_null_empties() -> None:
    assert compose("agd", "gradients.0.overlap=none", "gradients.0.overlap=backward") == compose("agd")
    assert compose("sgd", "gradients=null") == compose("local")
    assert compose("sgd", "gradients.0.topology=null") == compose("sgd")
    with pytest.raises(ConfigError, match="no effect after recipe sgd: write agd instead of sgd"):
        compose("sgd", "recipe=agd")


def test_an_override_leaves_the_callers_mapping_alone() -> None:
    target = {"gradients": [{"collective": {"name": "allreduce"}}]}
    compose(target, "gradients.0.overlap=backward", "gradients.0.segments=layers")
    assert target == {"gradients": [{"collective": {"name": "allreduce"}}]}


def test_a_reference_is_resolved() -> None:
    strategy = compose(
        {"epochs": 4, "strategy": {"parameters": [{"collective": "allreduce", "every": "${epochs}"}]}}
    )
    assert strategy.parameters[0].every == 4


@pytest.mark.parametrize(
    ("mapping", "equal"),
    [
        (AGD, True),
        ({"gradients": AGD["gradients"], "parameters": [{"collective": "broadcast", "every": 5}]}, True),
        (
            {
                "gradients": AGD["gradients"],
                "parameters": [{"collective": "allreduce", "delay": 1}],
            },
            True,
        ),
        ({"parameters": [{"collective": "allreduce"}]}, False),
        ({"gradients": []}, False),
    ],
)
def test_replicas_stay_equal_where_every_step_ends_in_the_worlds_value(mapping: Any, equal: bool) -> None:
    assert compose(mapping).keeps_replicas_equal(Placement.on_one_host(4)) is equal


def test_replicas_do_not_stay_equal_where_the_last_gradient_exchange_is_not_the_worlds() -> None:
    strategy = compose(AGD)
    four = Placement.on_one_host(4)
    unequal = replace(strategy.gradients[0], collective=_Unequal())
    assert not replace(strategy, gradients=(*strategy.gradients, unequal)).keeps_replicas_equal(four)
    assert not replace(strategy, parameters=(unequal,)).keeps_replicas_equal(four)
    rare = replace(strategy.gradients[0], every=2)
    assert not replace(strategy, gradients=(rare,)).keeps_replicas_equal(four)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("over", [{"size": 2}, {"size": 3}, {"count": 1}, {"size": 4, "sharded": True}])
def test_replicas_stay_equal_through_groups_their_leaders_and_groups_again(size: int, over: Any) -> None:
    if over.get("sharded") and size % over["size"] and size > over["size"]:
        return
    group, leaders = {"name": "group", **over}, {"name": "leaders", **over}
    stages = [
        {"collective": "allreduce", "over": group},
        {"collective": "allreduce", "over": leaders},
        {"collective": "broadcast", "over": group},
    ]
    placement = Placement.on_one_host(size)
    assert compose({"gradients": stages}).keeps_replicas_equal(placement)
    one_group = len(compose({"gradients": stages}).gradients[0].over.parts(placement)) == 1
    assert compose({"gradients": stages[:1]}).keeps_replicas_equal(placement) is one_group


BY_HOST = [
    {"collective": "allreduce", "over": {"name": "leaders", "by": "host"}},
    {"collective": "broadcast", "over": {"name": "group", "by": "host"}},
]
IN_PAIRS = {"collective": "allreduce", "over": {"name": "group", "size": 2}}
BROADCAST = {"collective": "broadcast"}


@pytest.mark.parametrize(
    ("mapping", "at_fault", "ranks"),
    [
        ({"gradients": [IN_PAIRS, *BY_HOST]}, "gradients.2", "ranks 2, 3, 4"),
        ({"gradients": [IN_PAIRS], "parameters": BY_HOST}, "parameters.1", "ranks 2, 3, 4"),
        ({"parameters": [BROADCAST]}, "parameters.0", "ranks 1, 2, 3 and 1 more"),
        (
            {
                "parameters": [
                    {"collective": {"name": "broadcast", "root": 3}, "over": {"name": "group", "count": 1}}
                ]
            },
            "parameters.0",
            "ranks 0, 1, 2 and 1 more",
        ),
        # The average is too late, or comes more seldom.
        (
            {"parameters": [BROADCAST, {"collective": "allreduce"}]},
            "parameters.0",
            "ranks 1, 2, 3 and 1 more",
        ),
        (
            {"parameters": [{"collective": "allreduce", "every": 4}, {**BROADCAST, "every": 6}]},
            "parameters.1",
            "ranks 1, 2, 3 and 1 more",
        ),
        (
            {
                "gradients": [
                    {"collective": {"name": "reduce", "root": 1}, "over": {"name": "group", "count": 2}},
                    *BY_HOST[1:],
                ]
            },
            "gradients.1",
            "ranks 1, 2, 3 and 1 more",
        ),
    ],
)
def test_ranks_whose_gradients_would_reach_nobody_are_named(mapping: Any, at_fault: str, ranks: str) -> None:
    strategy = compose(mapping)
    with pytest.raises(
        CompositionError, match=rf"^{at_fault} does not fit 5 ranks: .* the gradients of {ranks} are lost\."
    ):
        strategy.check_size(Placement.on_one_host(5))


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"gradients": [{"collective": "allreduce"}], "parameters": [BROADCAST]},
        {"parameters": [{"collective": "allreduce", "every": 3}, {**BROADCAST, "every": 6}]},
        {"gradients": [{**IN_PAIRS, "over": "world"}], "parameters": BY_HOST},
        {"gradients": [{**IN_PAIRS, "over": {"name": "group", "by": "host"}}], "parameters": BY_HOST},
        {"parameters": [{"collective": "gossip", "topology": "ring"}, {**BROADCAST, "every": 9}]},
    ],
)
def test_gradients_that_reach_some_replica_are_not_lost(mapping: Any) -> None:
    compose(mapping).check_size(Placement((0, 0, 1, 0, 1)))


@pytest.mark.parametrize(
    "overrides",
    [
        ("gradients.0.over.by=null", "gradients.0.over.size=2"),
        ("gradients.0.over.by=null", "gradients.0.over.count=2"),
        ("gradients.0.over.by=null", "gradients.0.over.size=2", "gradients.0.over.sharded=true"),
        ("gradients.0.segments=layers",),
    ],
)
def test_hierarchical_sgd_is_regrouped_by_one_key(overrides: tuple[str, ...]) -> None:
    strategy = compose("hierarchical_sgd", *overrides)
    of_group, of_leaders, again = (exchange.over for exchange in strategy.gradients)
    assert isinstance(of_leaders, Leaders)
    assert of_group == again == of_leaders.as_group()
    assert len({exchange.segments for exchange in strategy.gradients}) == 1
    strategy.check_size(Placement.on_one_host(4))
    assert strategy.keeps_replicas_equal(Placement.on_one_host(4))


class _Unequal(Allreduce):
    @property
    def traits(self) -> CollectiveTraits:
        return replace(super().traits, ends=Ends.OWN)


def test_a_size_that_a_topology_refuses_is_refused_with_the_exchange() -> None:
    topology = _OnlyEven()
    strategy = Strategy(parameters=(Exchange(Allreduce(), topology=topology),))
    strategy.check_size(Placement.on_one_host(4))
    with pytest.raises(CompositionError, match=r"^parameters\.0 does not fit 3 ranks: 3 is odd$"):
        strategy.check_size(Placement.on_one_host(3))


@dataclass(frozen=True)
class _OnlyEven(Complete):
    def check_size(self, size: int) -> None:
        if size % 2:
            raise ValueError(f"{size} is odd")


def test_composing_needs_no_torch() -> None:
    code = """if True:
        import sys
        from hocket.training.run import load_run
        from hocket.plugin import default_registry
        from hocket.strategy import compose
        compose("sgd"), load_run("agd", ["seed=1"]), default_registry().components()
        print("torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("written", ["none", {"name": "none"}, None])
def test_compressor_none_is_none(written: Any) -> None:
    strategy = compose({"gradients": [{"collective": "allreduce", "compressor": written}]})
    assert strategy.gradients[0].compressor is None
    resolved = strategy.resolved()
    assert resolved["gradients"][0]["compressor"] == {"name": "none"}
    assert compose(resolved) == strategy


def test_a_wrapper_holds_none_as_a_compressor() -> None:
    clipping = {"name": "local_clipping", "max_norm": 1.0, "compressor": "none"}
    strategy = compose({"gradients": [{"collective": "allreduce", "compressor": clipping}]})
    assert compose(strategy.resolved()) == strategy


def test_what_only_a_run_reads_of_a_file_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = "gradients: [{collective: allreduce, segments: layers}]"
    whole, bare = tmp_path / "whole.yaml", tmp_path / "bare.yaml"
    whole.write_text(
        f"name: mine\nrecipe: agd\noptimizer.lr: 0.2\ncheckpoint: {{every: 5}}\nranks: 8\nstrategy: {{{exchange}}}\n"
    )
    bare.write_text(
        f"name: mine\nsource: a paper\n{exchange}\nphases: {{3: {{gradients.0.segments: bytes}}}}\n"
    )
    strategies = hocket.virtual(3).run(lambda: compose(whole if hocket.join().rank else str(whole)))
    assert strategies == [compose(str(whole))] * 3
    assert caplog.messages == [
        f"{whole}: only `hocket run` reads optimizer, checkpoint, ranks; in a script, set them in the script"
    ]
    caplog.clear()
    for target in (str(bare), bare, "agd", {"recipe": "agd"}):
        compose(target)
    assert not caplog.messages


@pytest.mark.parametrize(("steps", "phase"), [(20, 40), (40, 20), (20, 20), (1, 60)])
@pytest.mark.parametrize("recipe", ["periodic_average", "dpsgd", "local"])
def test_a_synchronous_start_is_a_phase_of_agd(steps: int, phase: int, recipe: str) -> None:
    """Phases go on at their own steps; those within the start begin with what comes after it."""
    later = {"gradients": [{"collective": "allreduce"}], "parameters": []}
    asked = {"recipe": recipe, "phases": {phase: later}}
    plain, agd = compose(asked), compose("agd")
    strategy = compose(asked, f"synchronous_steps={steps}")
    for step in range(70):
        assert strategy.at(step).exchanges == (agd if step < steps else plain.at(step)).exchanges
    assert strategy == compose({**asked, "synchronous_steps": steps})
    assert compose(strategy.resolved()) == strategy
    assert compose(asked, "synchronous_steps=0") == plain


@pytest.mark.parametrize(
    ("share", "steps", "number"), [("25%", 900, 225), ("'12.5 %'", 10, 1), ("0%", 9, 0), ("100%", 9, 9)]
)
def test_a_synchronous_start_may_be_a_share_of_a_run_s_steps(share: str, steps: int, number: int) -> None:
    run = load_run("periodic_average", [f"synchronous_steps={share}", f"steps={steps}"])
    assert run == load_run("periodic_average", [f"synchronous_steps={number}", f"steps={steps}"])
    assert run.synchronous_steps == number


@pytest.mark.parametrize("overrides", [["synchronous_steps=25%"], ["synchronous_steps=101%", "steps=9"]])
def test_a_share_needs_the_number_of_steps(overrides: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"synchronous_steps: got .*a share of N, 0% to 100%.*A script writes"
    ):
        load_run("periodic_average", overrides)


@pytest.mark.parametrize("given_steps", ["-1", "0.25", "true", "many"])
def test_a_synchronous_start_is_a_number_of_steps(given_steps: str) -> None:
    with pytest.raises(ConfigError, match=r"synchronous_steps: got .*a number of steps, 0 or more"):
        compose("periodic_average", f"synchronous_steps={given_steps}")
