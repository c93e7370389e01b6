"""The matrix grows by itself: what a plugin registers enters it, and what cannot be tried is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matrix import accepted, choices, families, recipes, wrapped

from hocket.collective.allreduce import Allreduce
from hocket.compressor.topk import TopK
from hocket.compressor.wrapper import Wrapper
from hocket.plugin import Kind, Registry
from hocket.plugin.discovery import Plugin
from hocket.plugin.markers import hookimpl
from hocket.topology.plain import Ring


@dataclass(frozen=True)
class Reversed(Ring):
    twice: bool = False


@dataclass(frozen=True)
class Rounded(TopK):
    digits: int = 3


@dataclass(frozen=True)
class Halved(Wrapper):
    factor: float = 0.5


@dataclass(frozen=True)
class Named(TopK):
    path: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is missing")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    recipe = tmp_path / "odd.yaml"
    recipe.write_text("name: odd\nstrategy: {gradients: [{collective: allreduce}]}\n")

    class Hooks:
        @hookimpl
        def hocket_register(self, registry: Any) -> None:
            registry.topology("reversed", Reversed)
            registry.collective("summed", Allreduce)
            registry.compressor("rounded", Rounded)
            registry.compressor("halved", Halved)
            registry.recipe(recipe)

    registry = Registry(lambda: [])
    registry.add_plugin(Plugin("odd", "hocket-odd", "1.0"), Hooks())
    return registry


def test_a_plugin_enters(registry: Registry) -> None:
    assert "odd" in recipes(registry)
    assert {"odd.reversed", "odd.reversed+twice"} <= {each.id for each in choices(Kind.TOPOLOGY, registry)}
    assert {"odd.halved+topk", "error_feedback+odd.rounded"} <= {each.id for each in wrapped(registry)}
    ids = {
        cell.id
        for slot in ("gradients", "parameters")
        for family in families(slot, registry)
        for cell in family
    }
    assert {
        "gradients-odd.summed+ring-odd.rounded-world",
        "gradients-sparse_allreduce-odd.halved+topk-world",
        "gradients-sparse_allreduce-odd.rounded-hierarchy",
        "parameters-gossip-odd.reversed+twice-none-world-delay",
    } <= ids


def test_what_cannot_be_built_is_named(registry: Registry) -> None:
    registry.compressor("named", Named)
    with pytest.raises(LookupError, match="named: no values were found"):
        choices(Kind.COMPRESSOR, registry)


def test_every_component_of_an_exchange_is_in_some_cell() -> None:
    found = {
        id for slot in ("gradients", "parameters") for cell, _ in accepted(slot) for id in cell.id.split("-")
    }
    words = {word for id in found for word in id.split("+")}
    for kind in (Kind.COLLECTIVE, Kind.TOPOLOGY, Kind.COMPRESSOR):
        assert {each.id.split("+")[0] for each in choices(kind)} <= words
