# ruff: noqa: E501 - the table of messages reads better unbroken
"""Every refusal of a composition, caused, with its reason and the nearest thing that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from hocket.collective.allreduce import Allreduce
from hocket.compressor import NoCompression
from hocket.errors import CompositionError
from hocket.plugin import Registry
from hocket.strategy import compose, refusals


@dataclass(frozen=True)
class Gathering(Allreduce):
    gathers: ClassVar[bool] = True
    needs_topology: ClassVar[bool] = True


@dataclass(frozen=True)
class Sparse(NoCompression):
    reducible: ClassVar[bool] = False


@dataclass(frozen=True)
class Clipped(NoCompression):
    def prepare(self, segments: Sequence[Any], round: int) -> None: ...


@dataclass(frozen=True)
class Corrected(NoCompression):
    takes: ClassVar[frozenset[str]] = frozenset({"momentum", "weight_decay"})


@pytest.fixture
def registry() -> Registry:
    registry = Registry(lambda: [])
    registry.collective("gathering", Gathering)
    for name, compressor in (("sparse", Sparse), ("clipped", Clipped), ("corrected", Corrected)):
        registry.compressor(name, compressor)
    return registry


def exchange(**fields: Any) -> dict[str, Any]:
    return {"collective": "allreduce", **fields}


@pytest.mark.parametrize(
    ("slot", "fields", "key", "reasons"),
    [
        ("gradients", {"collective": "broadcast"}, "collective", ["broadcast (root: 0) means nothing here", "use it in parameters"]),
        ("gradients", {"overlap": "forward"}, "overlap", ["gradients cannot be hidden behind forward", "use none or backward"]),
        ("gradients", {"overlap": "delayed"}, "overlap", ["behind delayed", "use none or backward"]),
        ("parameters", {"overlap": "backward"}, "overlap", ["parameters cannot", "use none or forward or delayed"]),
        ("gradients", {"every": 4}, "every", ["every 4 steps", "drift apart", "session.accumulate()", "parameters every 4"]),
        ("gradients", {"compressor": "sparse"}, "compressor", ["allreduce combines messages in flight", "Sparse", "sparse_allreduce", "compressor none"]),
        ("gradients", {"topology": "complete"}, "topology", ["allreduce takes none", "gossip"]),
        ("gradients", {"collective": "gathering"}, "topology", ["Gathering needs one", "topology: complete"]),
        ("gradients", {"compressor": "clipped", "overlap": "backward"}, "overlap", ["Clipped looks at all gradients", "use none"]),
        ("parameters", {"compressor": "corrected"}, "compressor", ["Corrected takes over", "momentum and weight_decay", "use it in gradients"]),
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
        ("gradients", {"compressor": "corrected", "overlap": "backward"}),
        ("parameters", {"every": 4, "overlap": "forward"}),
        ("parameters", {"collective": "broadcast", "overlap": "delayed"}),
    ],
)
def test_what_the_refusals_recommend_composes(registry: Registry, slot: str, fields: dict[str, Any]) -> None:
    assert not list(refusals(compose({slot: [exchange(**fields)]}, registry=registry)))


def test_gradients_go_through_one_exchange() -> None:
    with pytest.raises(CompositionError) as caught:
        compose({"gradients": [exchange(), exchange()]})
    assert str(caught.value) == (
        "mapping: gradients.1: gradients.0 is there already, and this version carries gradients through one "
        "exchange: leave this one out, or exchange parameters after the step"
    )


def test_a_refusal_names_the_override_that_caused_it() -> None:
    with pytest.raises(CompositionError, match=r"^override 'gradients\.0\.every=2': gradients\.0\.every: "):
        compose("sgd", "gradients.0.every=2")


def test_a_compressor_prepares_exactly_if_it_says_how() -> None:
    assert Clipped().prepares
    assert not NoCompression().prepares


def test_only_the_last_exchange_of_parameters_overlaps() -> None:
    averages = [exchange(overlap="forward"), exchange()]
    with pytest.raises(
        CompositionError, match=r"parameters\.0\.overlap: forward leaves it under way when parameters\.1"
    ):
        compose({"parameters": averages})
    assert len(compose({"parameters": averages[::-1]}).parameters) == 2
