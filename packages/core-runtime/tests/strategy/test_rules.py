# ruff: noqa: E501 - the table of messages reads better unbroken
"""Every refusal of a composition, caused, with its reason and the nearest thing that works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from hocket.collective.allreduce import Allreduce
from hocket.collective.api import CollectiveTraits, Messages
from hocket.compressor import CompressorTraits, Identity, TopK
from hocket.errors import CompositionError, ConfigError
from hocket.plugin import Registry
from hocket.strategy import Placement, compose, refusals


@dataclass(frozen=True)
class Gathering(Allreduce):
    @property
    def traits(self) -> CollectiveTraits:
        return replace(super().traits, messages=Messages.GATHERED, needs_topology=True)


@dataclass(frozen=True)
class Sparse(TopK): ...


@dataclass(frozen=True)
class Particular(Allreduce):
    def check_compressor(self, compressor: Any) -> None:
        if not isinstance(compressor, Clipped):
            raise ValueError("only what is clipped is particular: use clipped")


@dataclass(frozen=True)
class Clipped(Identity):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True, prepares=True)


@dataclass(frozen=True)
class Corrected(Identity):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(True, applies_optimizer_terms=frozenset({"momentum", "weight_decay"}))


@dataclass(frozen=True)
class Levels(TopK):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=False, coarse=True)


@dataclass(frozen=True)
class Scattered(Identity):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True, same_coordinates=False, leaves_out=True)


@pytest.fixture
def registry() -> Registry:
    registry = Registry(lambda: [])
    registry.collective("gathering", Gathering)
    registry.collective("particular", Particular)
    for compressor in (Sparse, Clipped, Corrected, Levels, Scattered):
        registry.compressor(compressor.__name__.lower(), compressor)
    return registry


SGD = {"name": "sgd", "lr": 1.0}
BLEND = {"name": "blend", "local": 0.5}


def exchange(**fields: Any) -> dict[str, Any]:
    return {"collective": "allreduce", **fields}


@pytest.mark.parametrize(
    ("slot", "fields", "key", "reasons"),
    [
        ("gradients", {"collective": "broadcast"}, "collective", ["replace the other ranks' gradients", "allreduce"]),
        ("parameters", {"every": "log2_ranks", "over": {"name": "group", "size": 2}}, "every", ["log2_ranks over group (size: 2)", "`over: world`"]),
        ("parameters", {"progress": "thread"}, "progress", ["allreduce cannot use `progress: thread`", "use `progress: inline`"]),
        ("gradients", {"collective": "reduce"}, "collective", ["only the root would have the mean", "allreduce"]),
        ("parameters", {"collective": "reduce"}, "collective", ["only the root would have the mean", "broadcast"]),
        ("parameters", {"collective": "sparse_allreduce"}, "collective", ["averages only sent values", "use it in gradients, or give an outer"]),
        ("gradients", {"over": {"name": "leaders", "size": 2}}, "over", ["ranks that are not leaders", "group or world"]),
        ("parameters", {"over": {"name": "leaders", "size": 2}}, "over", ["only leaders would get the result", "{collective: broadcast, over: {name: group, size: 2}, segments: {name: bytes, size_mb: 8.0, first_mb: 1.0}, every: 1}"]),
        ("parameters", {"collective": "gossip", "topology": "irregular_directed"}, "topology", ["do not add up to 1", "`push_sum: true`"]),
        ("gradients", {"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed"}, "topology", ["not for gradients"]),
        ("parameters", {"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed", "compressor": "bf16"}, "compressor", ["push-sum sends whole segments"]),
        ("parameters", {"collective": "gossip", "topology": "ring", "compressor": "topk"}, "compressor", ["sends different elements", "shared_random"]),
        ("parameters", {"collective": "gossip", "topology": "ring", "compressor": {"name": "error_feedback", "compressor": "bf16"}}, "compressor", ["keeps the values that it does not send", "gradients"]),
        ("parameters", {"compressor": "scattered"}, "compressor", ["if ranks send different ones", "use shared_random"]),
        ("parameters", {"every": 4, "delay": 2, "merge": BLEND, "compressor": "shared_random"}, "merge", ["2 steps ago", "use `merge: add`, or `delay: 0`"]),
        ("parameters", {"collective": "gossip", "topology": "ring", "compressor": "clipped"}, "compressor", ["Clipped needs all gradients", "use it in gradients"]),
        ("gradients", {"overlap": "forward"}, "overlap", ["gradients cannot be overlapped with forward", "use none or backward"]),
        ("gradients", {"delay": 1}, "delay", ["delay works only for exchanges of parameters"]),
        ("gradients", {"outer": {"name": "sgd", "lr": 1.0}}, "outer", ["outer works only for exchanges of parameters"]),
        ("gradients", {"stagger": True}, "stagger", ["stagger works only for exchanges of parameters"]),
        ("parameters", {"outer": SGD, "collective": "broadcast"}, "outer", ["broadcast does not give all ranks the same mean", "use `collective: allreduce`"]),
        ("parameters", {"outer": SGD, "collective": "gossip", "topology": "ring"}, "outer", ["gossip does not give all ranks the same mean"]),
        ("parameters", {"outer": SGD, "collective": {"name": "gossip", "push_sum": True}, "topology": "exponential"}, "outer", ["would drift apart"]),
        ("parameters", {"outer": SGD, "compressor": "shared_random"}, "compressor", ["lose the rest", "error_feedback"]),
        ("parameters", {"outer": SGD, "collective": "sparse_allreduce", "compressor": "topk"}, "compressor", ["topk", "lose the rest", "error_feedback"]),
        ("parameters", {"collective": "gossip", "topology": "ring", "compressor": "levels"}, "compressor", ["is too coarse for parameters", "outer"]),
        ("parameters", {"delay": 1, "overlap": "forward"}, "overlap", ["delay 1 already overlaps the exchange", "use none"]),
        ("parameters", {"delay": 3, "every": 2}, "delay", ["delay 3 is longer", "use 2 or less"]),
        ("parameters", {"delay": 2, "every": 2, "merge": BLEND}, "merge", ["would overwrite all steps", "shorter delay, or `merge: add`"]),
        ("parameters", {"every": 4, "offset": -4}, "offset", ["-4 is outside the period of 4 steps"]),
        ("parameters", {"every": "log2_ranks", "offset": 1}, "offset", ["1 is outside the period of log2_ranks"]),
        ("parameters", {"every": 3, "stagger": True, "segments": {"name": "fragments", "count": 4}}, "stagger", ["4 fragments need 4 steps"]),
        ("parameters", {"collective": "broadcast", "merge": BLEND}, "merge", ["result of broadcast is not an average", "merge: add"]),
        ("parameters", {"collective": {"name": "gossip", "push_sum": True}, "topology": "exponential", "merge": BLEND}, "merge", ["not an average"]),
        ("parameters", {"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed", "segments": {"name": "fragments", "count": 2}}, "segments", ["adjacent parameters", "use layers"]),
        ("parameters", {"overlap": "backward"}, "overlap", ["parameters cannot", "use none or forward"]),
        ("gradients", {"every": 4}, "every", ["every 4 steps", "drift apart", "session.accumulate()", "parameters every 4"]),
        ("gradients", {"compressor": "sparse"}, "compressor", ["allreduce adds messages while it sends", "Sparse", "sparse_allreduce", "compressor none"]),
        ("gradients", {"collective": "particular"}, "compressor", ["only what is clipped is particular: use clipped"]),
        ("gradients", {"topology": "complete"}, "topology", ["allreduce has no topology", "gossip"]),
        ("gradients", {"collective": "gathering"}, "topology", ["Gathering needs a topology", "topology: complete"]),
        ("gradients", {"compressor": "clipped", "overlap": "backward"}, "overlap", ["Clipped needs all gradients", "use none"]),
        ("parameters", {"collective": "gossip", "topology": "ring", "compressor": "corrected"}, "compressor", ["Corrected applies", "momentum and weight_decay", "use it in gradients"]),
    ],
)  # fmt: skip
def test_an_exchange_that_means_nothing_is_refused(
    registry: Registry, slot: str, fields: dict[str, Any], key: str, reasons: list[str]
) -> None:
    with pytest.raises(CompositionError) as caught:
        compose({slot: [exchange(**fields)]}, registry=registry)
    message = str(caught.value)
    assert message.startswith(f"mapping: {slot}.0.{key}: ")
    for reason in reasons:
        assert reason in message


@pytest.mark.parametrize(
    ("slot", "fields"),
    [
        ("gradients", {"collective": "gathering", "topology": "complete", "compressor": "sparse"}),
        ("gradients", {"compressor": "clipped"}),
        ("gradients", {"collective": "particular", "compressor": "clipped"}),
        ("gradients", {"compressor": "corrected", "overlap": "backward"}),
        ("parameters", {"every": 4, "overlap": "forward"}),
        ("parameters", {"collective": "broadcast", "delay": 1}),
        ("parameters", {"outer": SGD}),
        ("parameters", {"compressor": "shared_random", "every": 4, "delay": 2}),
        (
            "parameters",
            {"outer": SGD, "compressor": {"name": "error_feedback", "compressor": "shared_random"}},
        ),
        (
            "parameters",
            {
                "outer": SGD,
                "collective": "sparse_allreduce",
                "compressor": {"name": "error_feedback", "decay": 0.95, "compressor": "topk"},
            },
        ),
        ("parameters", {"outer": SGD, "collective": "sparse_allreduce", "compressor": "levels"}),
        ("parameters", {"every": 2, "delay": 2, "merge": "add"}),
        ("parameters", {"every": 2, "delay": 1, "merge": BLEND}),
        (
            "parameters",
            {"every": 4, "offset": -3, "stagger": True, "segments": {"name": "fragments", "count": 4}},
        ),
        (
            "parameters",
            {"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed"},
        ),
        ("parameters", {"collective": "gossip", "topology": "ring", "compressor": "shared_random"}),
    ],
)
def test_what_the_refusals_recommend_composes(registry: Registry, slot: str, fields: dict[str, Any]) -> None:
    assert not list(refusals(compose({slot: [exchange(**fields)]}, registry=registry)))


@pytest.mark.parametrize(
    ("fields", "key", "reason"),
    [
        (
            {"segments": "layers"},
            "segments",
            "must have the same segments: use bytes (size_mb: 8.0, first_mb: 1.0), as gradients.0 does",
        ),
        ({"overlap": "backward"}, "overlap", "leave overlap out, and set it in gradients.0"),
        (
            {"compressor": "clipped"},
            "compressor",
            "needs a rank's own gradients, which only gradients.0 sends",
        ),
    ],
)
def test_later_exchanges_of_gradients_follow_the_first(
    registry: Registry, fields: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(CompositionError) as caught:
        compose({"gradients": [exchange(), exchange(**fields)]}, registry=registry)
    assert str(caught.value).startswith(f"mapping: gradients.1.{key}: ")
    assert reason in str(caught.value)


def test_what_leaders_exchange_is_broadcast_in_the_same_groups_and_as_often() -> None:
    leaders = exchange(over={"name": "leaders", "size": 2}, every=4)
    heard = exchange(collective="broadcast", over={"name": "group", "size": 2}, every=4)
    assert len(compose({"parameters": [leaders, heard]}).parameters) == 2
    for wrong in (
        {"every": 2},
        {"over": {"name": "group", "size": 4}},
        {"collective": {"name": "broadcast", "root": 1}},
    ):
        with pytest.raises(CompositionError, match=r"parameters\.0\.over: only leaders would get the result"):
            compose({"parameters": [leaders, {**heard, **wrong}]})


def test_push_sum_weights_are_known_to_no_other_exchange() -> None:
    pushing = exchange(collective={"name": "gossip", "push_sum": True}, topology="irregular_directed")
    with pytest.raises(CompositionError, match=r"parameters\.0\.topology: .* needs push-sum weights"):
        compose({"parameters": [pushing, exchange(every=9)]})


def test_own_coordinates_go_with_a_periodic_average() -> None:
    gossip = exchange(collective="gossip", topology="ring", compressor="topk")
    assert compose({"parameters": [gossip, exchange(every=100)]})


def test_a_refusal_names_the_override_that_caused_it() -> None:
    with pytest.raises(CompositionError, match=r"^override 'gradients\.0\.every=2': gradients\.0\.every: "):
        compose("sgd", "gradients.0.every=2")


def test_only_the_last_exchange_of_parameters_overlaps() -> None:
    averages = [exchange(overlap="forward"), exchange()]
    with pytest.raises(
        CompositionError,
        match=r"parameters\.0\.overlap: with overlap forward this exchange is not complete when parameters\.1",
    ):
        compose({"parameters": averages})
    assert len(compose({"parameters": averages[::-1]}).parameters) == 2


@pytest.mark.parametrize(
    "fields", [{"offset": 1}, {"stagger": True}, {"every": 6}], ids=["offset", "stagger", "every"]
)
def test_leaders_are_heard_in_the_steps_in_which_they_exchange(fields: dict[str, Any]) -> None:
    group = {"size": 2}
    leaders = exchange(over={"name": "leaders", **group}, every=4, outer=SGD)
    heard = {"collective": "broadcast", "over": {"name": "group", **group}, "every": 4}
    assert not list(refusals(compose({"parameters": [leaders, heard]})))
    with pytest.raises(CompositionError, match="only leaders would get the result"):
        compose({"parameters": [{**leaders, **fields}, heard]})


def test_only_the_last_exchange_may_be_delayed() -> None:
    with pytest.raises(
        CompositionError, match=r"parameters\.0\.delay: with a delay this exchange is not complete when"
    ):
        compose({"parameters": [exchange(every=4, delay=1), exchange()]})


def test_what_once_was_an_overlap_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"overlap: got 'delayed': write `delay: 1, merge: add`"):
        compose({"parameters": [exchange(overlap="delayed")]})


def test_a_period_that_is_too_short_for_a_delay_among_some_ranks_is_refused_there() -> None:
    strategy = compose({"parameters": [exchange(every="log2_ranks", delay=2)]})
    strategy.check_size(Placement.on_one_host(4))
    with pytest.raises(
        CompositionError, match="delay 2 is longer than this exchange's period among 2 ranks, 1 step: use 1"
    ):
        strategy.check_size(Placement.on_one_host(2))


def test_a_broadcast_in_a_step_of_its_own_loses_what_others_have_trained() -> None:
    average, copied = exchange(every=4), {"collective": "broadcast", "every": 4}
    compose({"parameters": [average, copied]}).check_size(Placement.on_one_host(3))
    apart = compose({"parameters": [average, {**copied, "offset": 1}]})
    with pytest.raises(CompositionError, match="the gradients of ranks 1, 2 are lost"):
        apart.check_size(Placement.on_one_host(3))
