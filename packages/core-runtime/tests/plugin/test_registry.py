"""Finding, loading and refusing plugins that are installed as pip would install them, and resolving names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError, MissingPluginError
from hocket.installing import how_to_install
from hocket.plugin import KNOWN_WORDS, Kind, Plugin, Registry, hookimpl
from hocket.strategy import compose
from hocket.topology import Complete

CROSSOVER = """
from dataclasses import dataclass
from hocket.plugin import hookimpl
from hocket.topology import Complete

@dataclass(frozen=True)
class FairRandom(Complete):
    seed: int = 0

@hookimpl
def hocket_register(registry):
    registry.topology("fair_random", FairRandom)
    registry.topology("lazy", "hocket_crossover:FairRandom")
    registry.compressor("broken", "hocket_crossover:NotThere")
    registry.compressor("heavy", "hocket_not_installed:Heavy")
    registry.compressor("wrong", "hocket_crossover:FairRandom")
"""

EMPTY = "from hocket.plugin import hookimpl\n\n@hookimpl\ndef hocket_register(registry): pass\n"


def message_of(registry: Registry, name: str, kind: str = "topology") -> str:
    with pytest.raises(ConfigError) as caught:
        registry.resolve(kind, name)
    return str(caught.value)


def test_core_is_there_without_a_prefix() -> None:
    registry = Registry(lambda: [])
    assert registry.resolve(Kind.TOPOLOGY, "complete") is Complete
    assert registry.name_of(Kind.TOPOLOGY, Complete) == "complete"
    assert [plugin.package for plugin in registry.loaded()] == ["hocket-core"]
    assert {registration.kind for registration in registry.components()} >= {
        Kind.COLLECTIVE,
        Kind.TASK,
        Kind.ENGINE,
    }


def test_every_core_component_can_be_resolved() -> None:
    registry = Registry(lambda: [])
    for registration in registry.components():
        component = registry.resolve(registration.kind, registration.name)
        assert registry.name_of(registration.kind, component) == registration.name


def test_only_the_plugin_that_is_named_is_loaded(install: Any) -> None:
    install("crossover", CROSSOVER)
    install("sloth", "raise RuntimeError('nobody asked for me')")
    registry = Registry()
    assert {"crossover", "sloth"} <= set(registry.installed())
    registry.resolve("topology", "complete")
    assert "hocket_crossover" not in sys.modules
    found = registry.resolve("topology", "crossover.fair_random")
    assert found.__name__ == "FairRandom"
    assert registry.resolve("topology", "crossover.lazy") is found
    assert registry.loaded()[1:] == (Plugin("crossover", "hocket-crossover", "1.0"),)
    assert "hocket_sloth" not in sys.modules


def test_a_component_with_the_plugins_word_is_found_by_it_alone(install: Any) -> None:
    install("crossover", CROSSOVER + "    registry.topology('crossover', FairRandom)\n")
    registry = Registry()
    assert registry.resolve("topology", "crossover").__name__ == "FairRandom"
    assert "registers no" not in message_of(registry, "crossover.lossy")
    assert "'crossover' is a topology, not a compressor" in message_of(registry, "crossover", "compressor")


def test_a_component_of_a_plugin_is_configured_by_its_fields(install: Any) -> None:
    install("crossover", CROSSOVER)
    registry = Registry()
    exchange: dict[str, Any] = {"collective": "allreduce"}
    exchange["topology"] = {"name": "crossover.fair_random", "seed": 4}
    with pytest.raises(ConfigError, match=r"^mapping: gradients\.0\.topology: allreduce has no topology"):
        compose({"gradients": [exchange]}, registry=registry)
    exchange["topology"] = {"name": "crossover.fair_random", "sed": 4}
    with pytest.raises(
        ConfigError,
        match=r"^mapping: gradients\.0\.topology\.sed: unknown key\. Did you mean 'seed'\? Allowed: seed$",
    ):
        compose({"gradients": [exchange]}, registry=registry)


@pytest.mark.parametrize("word", KNOWN_WORDS)
def test_a_plugin_of_ours_that_is_missing_is_answered_with_its_package(word: str) -> None:
    registry = Registry(lambda: [])
    expected = f"plugin {word!r} is not installed: {how_to_install(f'hocket-{word}')}"
    with pytest.raises(MissingPluginError) as caught:
        registry.resolve("topology", f"{word}.thing")
    assert str(caught.value) == expected
    with pytest.raises(MissingPluginError) as caught:
        registry.resolve("topology", word)
    assert str(caught.value) == expected
    with pytest.raises(MissingPluginError) as caught:
        registry.recipe_file(word)
    assert str(caught.value) == expected


TASKS = """
from hocket.plugin import hookimpl

@hookimpl
def hocket_register(registry):
    registry.task("fashion", "hocket.task.digits:Digits")
"""


def test_a_task_that_core_lacks_is_looked_up_among_the_tasks_without_a_prefix(install: Any) -> None:
    install("tasks", TASKS)
    registry = Registry()
    registry.resolve("task", "digits")
    assert len(registry.loaded()) == 1
    assert registry.resolve("task", "fashion").__name__ == "Digits"
    assert registry.names("task") == ["digits", "fashion"]
    message = message_of(registry, "tasks.fashion", "task")
    assert message == (
        "there is no task 'tasks.fashion'. Did you mean 'fashion'? There are: digits, fashion. "
        "One of your own is module:attribute, such as tasks.fashion:MyTask"
    )
    with pytest.raises(ConfigError) as caught:
        registry.recipe_file("task")
    assert "tasks" not in str(caught.value)


def test_a_task_that_core_lacks_is_answered_with_the_package_of_tasks() -> None:
    with pytest.raises(MissingPluginError) as caught:
        Registry(lambda: []).resolve("task", "digit")
    assert str(caught.value) == (
        "there is no task 'digit'. Did you mean 'digits'? There are: digits. "
        "One of your own is module:attribute, such as digit:MyTask. "
        f"hocket-tasks has more, but is not installed: {how_to_install('hocket-tasks')}"
    )


def test_another_missing_plugin_is_answered_with_what_is_installed(install: Any) -> None:
    install("sloth", EMPTY)
    message = message_of(Registry(), "slot.thing")
    assert message.startswith("no installed package registers a plugin 'slot' (installed: ")
    assert "check [project.entry-points.hocket] of its pyproject.toml, and pip install -e . again" in message
    assert message.endswith("Did you mean 'sloth'?")
    assert "(installed: none)" in message_of(Registry(lambda: []), "slot.thing")


def test_a_plugin_that_does_not_import_harms_only_who_names_it(install: Any) -> None:
    install("sloth", "import hocket_not_installed\n", version="2.5")
    registry = Registry()
    with pytest.raises(MissingPluginError) as caught:
        registry.resolve("topology", "sloth.ring")
    assert str(caught.value) == (
        "plugin 'sloth' of package hocket-sloth 2.5 does not load: "
        "ModuleNotFoundError: No module named 'hocket_not_installed'"
    )
    assert registry.resolve("topology", "complete") is Complete


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("", "it has no function hocket_register marked with hocket.plugin.hookimpl"),
        (EMPTY.replace("pass", "1 / 0"), "ZeroDivisionError: division by zero"),
        (EMPTY.replace("pass", "registry.scope('x', int)"), "of hocket-sloth 1.0: builtins.int is not a"),
        (EMPTY.replace("registry)", "registry, more)"), "PluginValidationError: "),
    ],
)  # fmt: skip
def test_a_plugin_that_does_not_register_is_refused_each_time(install: Any, source: str, cause: str) -> None:
    install("sloth", source)
    registry = Registry()
    for _ in range(2):
        with pytest.raises(MissingPluginError) as caught:
            registry.resolve("topology", "sloth.ring")
        assert str(caught.value).startswith("plugin 'sloth' of package hocket-sloth 1.0 does not register: ")
        assert cause in str(caught.value)


def test_a_plugin_that_fails_half_way_leaves_nothing_behind(install: Any) -> None:
    body = "registry.topology('x', 'm:X'); registry.topology('x', 'm:Y')"
    install("sloth", EMPTY.replace("pass", body))
    registry = Registry()
    before = registry.components()
    assert "topology 'sloth.x' is registered twice: m:X by hocket-sloth 1.0 and m:Y" in message_of(
        registry, "sloth.x"
    )
    assert registry.components() == before


def test_two_packages_with_the_same_word_are_refused(install: Any) -> None:
    install("sloth", EMPTY, package="hocket-sloth")
    install("sloth", EMPTY, package="sloth-fork", version="0.3")
    message = message_of(Registry(), "sloth.x")
    assert message.startswith("plugin 'sloth' is provided by ")
    assert "hocket-sloth 1.0" in message
    assert "sloth-fork 0.3" in message


@pytest.mark.parametrize(
    ("requirement", "fits"),
    [
        ("hocket-core>=0.2,<0.3", False),
        ("Hocket.Core<0.1.5", False),
        ("hocket-core>=0.1,<0.3", True),
        ("hocket-core>=0.3; python_version<'3'", True),
        ("hocket-core>=0.3; extra=='test'", True),
        ("numpy>=1", True),
    ],
)
def test_a_plugin_for_another_core_is_refused(install: Any, requirement: str, fits: bool) -> None:
    install("", "", package="hocket-core", version="0.1.7")
    install("sloth", EMPTY, requires=(requirement,))
    registry = Registry()
    if fits:
        assert registry.load("sloth").package == "hocket-sloth"
        return
    message = message_of(registry, "sloth.x")
    assert message.startswith("plugin 'sloth' of package hocket-sloth 1.0 needs hocket-core")
    assert message.endswith("but this is hocket-core 0.1.7: install matching versions")


def test_an_unknown_name_is_answered_with_what_there_is(install: Any) -> None:
    install("crossover", CROSSOVER)
    registry = Registry()
    assert message_of(registry, "complet") == (
        "there is no topology 'complet'. Did you mean 'complete'? There are: complete, crossover.fair_random, "
        "crossover.lazy, exponential, irregular_directed, random_matching, ring."
    )
    assert "Did you mean 'crossover.fair_random'?" in message_of(Registry(), "fair_random")
    assert (
        "Plugin 'crossover' of hocket-crossover 1.0 registers no collective: registry.collective"
        in message_of(registry, "crossover.lossy", "collective")
    )
    message = message_of(registry, "crossover.fair_randm")
    known = "complete, crossover.fair_random, crossover.lazy, exponential, irregular_directed, random_matching, ring"
    assert f". Did you mean 'crossover.fair_random'? There are: {known}." in message


def test_a_name_of_another_kind_is_said_to_be_one() -> None:
    message = message_of(Registry(lambda: []), "complete", "collective")
    assert message.startswith("'complete' is a topology, not a collective. There are: allreduce, broadcast")


def test_what_cannot_be_imported_when_it_is_named_is_refused(install: Any) -> None:
    install("crossover", CROSSOVER)
    registry = Registry()
    origin = "of hocket-crossover 1.0"
    assert f"compressor 'crossover.broken' {origin}: module" in message_of(
        registry, "crossover.broken", "compressor"
    )
    heavy = message_of(registry, "crossover.heavy", "compressor")
    assert f"compressor 'crossover.heavy' {origin} does not import: ModuleNotFoundError" in heavy
    wrong = message_of(registry, "crossover.wrong", "compressor")
    assert (
        f"compressor 'crossover.wrong' {origin} is not a subclass of hocket.compressor.api.Compressor"
        in wrong
    )


def test_a_class_of_ones_own_needs_no_plugin() -> None:
    registry = Registry(lambda: [])
    path = "hocket.topology.plain:Complete"
    assert registry.resolve("topology", path) is Complete
    assert "compressor 'hocket.topology.plain:Complete' is not a subclass" in message_of(
        registry, path, "compressor"
    )
    assert "is not of the form 'module:Class'" in message_of(registry, ":Complete")
    assert "no attribute 'Missing'" in message_of(registry, "hocket.topology.plain:Missing")


def test_a_plugins_recipes_are_found_by_name(install: Any, tmp_path: Path) -> None:
    for stem in ("sloth", "lazy"):
        (tmp_path / f"{stem}.yaml").write_text(
            "gradients: [allreduce]" if stem == "lazy" else "strategy: {parameters: []}"
        )
    install(
        "sloth",
        EMPTY.replace(
            "pass", f"[registry.recipe({str(tmp_path)!r} + f'/{{s}}.yaml') for s in ('sloth', 'lazy')]"
        ),
    )
    registry = Registry()
    assert compose("sloth", registry=registry).name == "sloth"
    assert registry.recipe_file("sloth.lazy").path == tmp_path / "lazy.yaml"
    with pytest.raises(
        ConfigError, match=r"^recipe sloth\.lazy: gradients\.0: got 'allreduce'; allowed: a mapping of coll"
    ):
        compose("sloth.lazy", registry=registry)
    with pytest.raises(
        ConfigError,
        match=r"there is no recipe 'sloth\.lasy'\. Did you mean 'sloth\.lazy' or 'sloth'\? There are: ",
    ):
        registry.recipe_file("sloth.lasy")


def test_near_recipes_of_plugins_that_nobody_has_loaded_are_offered(install: Any, tmp_path: Path) -> None:
    for word in ("sloth", "snail"):
        (tmp_path / word).mkdir()
        recipe = tmp_path / word / "lazy.yaml"
        recipe.write_text("gradients: []")
        install(word, EMPTY.replace("pass", f"registry.recipe({str(recipe)!r})"))
    install("wrong", "import hocket_not_installed\n")
    for given, near in (("lazy", "'sloth.lazy' or 'snail.lazy'"), ("slot.lazy", "'sloth.lazy'")):
        with pytest.raises(ConfigError) as caught:
            Registry().recipe_file(given)
        assert f"Did you mean {near}" in str(caught.value)


def test_observers_hear_of_steps() -> None:
    class Observer:
        seen: list[tuple[str, int]] = []  # noqa: RUF012

        @hookimpl
        def hocket_step_end(self, session: str, step: int) -> None:
            self.seen.append((session, step))

    registry = Registry(lambda: [])
    registry.observe(Observer())
    registry.hook.hocket_step_end(session="session", step=3)
    assert Observer.seen == [("session", 3)]
