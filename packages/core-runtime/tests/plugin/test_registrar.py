"""Components that may be registered, and how others are refused."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hocket.errors import ConfigError
from hocket.plugin import Kind, Plugin, Registrar, Registry
from hocket.plugin.kinds import kind_of_hint
from hocket.plugin.registrar import Tables
from hocket.strategy.scope import Scope, World
from hocket.topology import Complete, Topology

if TYPE_CHECKING:
    from hocket.nowhere import Nothing  # type: ignore[import-not-found]  # on purpose

CROSSOVER = Plugin("crossover", "hocket-crossover", "1.2")


@dataclass(frozen=True)
class Ring(Complete):
    degree: int = 2


@dataclass(frozen=True)
class Abstract(Topology):
    @abstractmethod
    def more(self) -> None: ...


@dataclass
class Thawed(Scope):  # a frozen dataclass cannot be inherited by one that is not
    def ranks(self, rank: int, size: int) -> range:
        return range(size)


class Undecorated(Complete):
    pass


@dataclass(frozen=True)
class Named(Complete):
    name: str = "x"


@dataclass(frozen=True)
class Unresolved(Complete):
    thing: Nothing | None = None


@pytest.fixture
def tables() -> Tables:
    return Tables()


@pytest.fixture
def registrar(tables: Tables) -> Registrar:
    return Registrar(CROSSOVER, tables)


def test_a_component_is_named_after_its_plugin(registrar: Registrar, tables: Tables) -> None:
    registrar.topology("fair_random", Ring)
    registration = tables.components[Kind.TOPOLOGY, "crossover.fair_random"]
    assert (registration.component, registration.plugin) == (Ring, CROSSOVER)


def test_the_plugins_word_as_a_name_has_no_prefix(registrar: Registrar, tables: Tables) -> None:
    registrar.topology("crossover", Ring)
    registrar.benchmark("crossover", "somewhere", "compares nothing")
    assert tables.components[Kind.TOPOLOGY, "crossover"].plugin == CROSSOVER
    assert list(tables.benchmarks) == ["crossover"]


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_its_method_and_its_interface(
    registrar: Registrar, tables: Tables, kind: Kind
) -> None:
    getattr(registrar, kind.value)("thing", "somewhere:Thing")
    assert (kind, "crossover.thing") in tables.components
    assert kind.interface.__name__ == kind.interface_path.partition(":")[2]
    assert kind_of_hint(kind.interface) is kind


def test_only_components_are_of_a_kind() -> None:
    assert kind_of_hint(World) is Kind.SCOPE
    assert kind_of_hint(int) is None
    assert kind_of_hint(int | None) is None


@pytest.mark.parametrize(
    ("component", "reason"),
    [
        (World, "is not a subclass of hocket.topology.api.Topology"),
        (Ring(), "is not a subclass of hocket.topology.api.Topology"),
        (Undecorated, "is not a frozen dataclass"),
        (Abstract, "does not implement more, neighbours"),
        (Named, "has a field called 'name'"),
        (Unresolved, "has an annotation that cannot be evaluated at run time: name 'Nothing' is not defined"),
    ],
)
def test_what_is_no_component_is_refused_by_name(registrar: Registrar, component: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registrar.topology("fair_random", component)
    message = str(caught.value)
    assert "topology 'crossover.fair_random' of hocket-crossover 1.2: " in message
    assert getattr(component, "__name__", "Ring") in message
    assert reason in message


def test_a_dataclass_that_is_not_frozen_is_refused(registrar: Registrar) -> None:
    with pytest.raises(
        ConfigError, match=r"Thawed is not a frozen dataclass \(write @dataclass\(frozen=True\)"
    ):
        registrar.scope("thawed", Thawed)


@pytest.mark.parametrize("name", ["crossover.ring", "Ring", "", "fair-random", "1ring"])
def test_a_malformed_name_is_refused(registrar: Registrar, name: str) -> None:
    with pytest.raises(
        ConfigError, match="a name has lower-case letters, digits and underscores, and no prefix"
    ):
        registrar.topology(name, Ring)


def test_a_duplicate_is_refused_with_both_origins(registrar: Registrar, tables: Tables) -> None:
    registrar.topology("loop", Ring)
    other = Registrar(Plugin("crossover", "other-package", "3"), tables)
    with pytest.raises(ConfigError) as caught:
        other.topology("loop", "other_package.ring:Ring")
    assert str(caught.value) == (
        f"topology 'crossover.loop' is registered twice: {Ring.__module__}.Ring by hocket-crossover 1.2 "
        "and other_package.ring:Ring by other-package 3. Rename one of them"
    )
    registrar.scope("loop", World)  # another kind is another name


def test_a_recipe_is_named_by_its_file(registrar: Registrar, tables: Tables, tmp_path: Path) -> None:
    for stem in ("crossover", "hierarchical"):
        (tmp_path / f"{stem}.yaml").write_text("{}")
        registrar.recipe(tmp_path / f"{stem}.yaml")
    assert list(tables.recipes) == ["crossover", "crossover.hierarchical"]


def test_a_missing_recipe_file_and_a_duplicate_are_refused(registrar: Registrar, tmp_path: Path) -> None:
    path = tmp_path / "crossover.yaml"
    with pytest.raises(
        ConfigError, match=f"recipe 'crossover' of hocket-crossover 1.2: there is no file {path}"
    ):
        registrar.recipe(path)
    path.write_text("{}")
    registrar.recipe(str(path))
    with pytest.raises(
        ConfigError, match=r"'crossover' is registered twice: by hocket-crossover 1\.2 and by hocket"
    ):
        registrar.recipe(path)


def test_a_registry_registers_without_prefix() -> None:
    registry = Registry(lambda: [])
    registry.topology("loop", Ring)
    assert registry.resolve("topology", "loop") is Ring
    assert registry.name_of("topology", Ring) == "loop"
