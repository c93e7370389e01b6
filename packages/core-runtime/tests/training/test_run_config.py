"""A run's file: defaults, the order of the layers, and the complete configuration that comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hocket.config.reference import Reference
from hocket.config.settings import OnNonfinite, TransportName
from hocket.session.engine import DataParallel
from hocket.strategy import compose
from hocket.task import Digits
from hocket.training.run import RunConfig, build_engine, build_task, load_run, resolved
from hocket.transport.network import NetworkModel

COMPLETE = """
task: {name: digits}
optimizer: {name: sgd, lr: 1e-1, momentum: 0.9}
epochs: 5
batch_size: 32
seed: 0
ranks: 8
transport: mpi
engine: data_parallel
strategy:
  samples: null
  gradients:
    - {collective: allreduce, over: {name: world}, compressor: {name: none}, overlap: backward}
  parameters:
    - {collective: broadcast, over: world, every: 1}
delays: null
phases: {}
"""


def test_a_complete_file_of_the_design_loads(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(COMPLETE)
    run = load_run(path)
    assert run.optimizer == Reference("sgd", {"lr": 0.1, "momentum": 0.9})
    assert (run.ranks, run.transport, run.engine.name) == (8, "mpi", "data_parallel")
    assert [exchange.name for exchange in run.strategy.exchanges] == ["gradients.0", "parameters.0"]
    assert build_task(run) == Digits()
    assert build_engine(run) == DataParallel()


def test_every_key_has_a_default() -> None:
    run = load_run({})
    told = {key: getattr(run, key) for key in ("description", "source", "changes", "accuracy")}
    assert run == RunConfig(name="sgd", **told, strategy=compose("sgd"))
    assert (run.transport, run.on_nonfinite) == (None, OnNonfinite.ERROR)
    assert (run.task.name, run.optimizer.name, run.batch_size, run.steps) == ("digits", "sgd", 32, None)


def test_defaults_then_recipe_then_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: agd\nepochs: 7\nseed: 1\noptimizer: {lr: 0.5}\nnetwork: {latency_s: 1}\n")
    run = load_run(path, ["seed=2", "network.bandwidth_bits_per_s=8e6", "gradients.0.overlap=none"])
    assert run.batch_size == 32
    assert run.recipe == "agd"
    assert run.optimizer == Reference("sgd", {"lr": 0.5, "momentum": 0.9})
    assert run.epochs == 7
    assert run.seed == 2
    assert run.network == NetworkModel(1.0, 8e6)
    assert run.strategy == compose("agd", "gradients.0.overlap=none")


def test_a_default_can_be_changed_in_part() -> None:
    run = load_run({"gradients": []}, ["optimizer.lr=0.05"])
    assert run.optimizer == Reference("sgd", {"lr": 0.05, "momentum": 0.9})


def test_naming_an_optimizer_replaces_its_arguments() -> None:
    assert load_run({"recipe": "sgd", "optimizer": {"name": "adam", "lr": 0.01}}).optimizer.arguments == {
        "lr": 0.01
    }
    assert load_run("sgd", ["optimizer=adam"]).optimizer == Reference("adam")
    assert load_run("sgd", ["optimizer=adam", "optimizer.lr=2e-3"]).optimizer.arguments == {"lr": 0.002}


def test_overrides_of_slots_may_leave_out_the_strategy() -> None:
    short = load_run("sgd", ["gradients.0.segments=layers"])
    assert short == load_run("sgd", ["strategy.gradients.0.segments=layers"])
    assert short != load_run("sgd")


def test_an_override_can_change_the_recipe_below_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: sgd\nepochs: 2\n")
    run = load_run(path, ["recipe=agd"])
    assert run.strategy == compose("agd")
    assert run.epochs == 2


def test_a_file_may_be_anything_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agd").mkdir()
    Path("mine").write_text("epochs: 9\n")
    assert load_run("mine").epochs == 9
    assert load_run("agd").name == "agd"


def test_a_path_in_a_file_changes_one_key_of_the_recipe_as_an_override_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: periodic_average\nparameters.0.every: 20\noptimizer.lr: 0.03\n")
    overridden = load_run("periodic_average", ["parameters.0.every=20", "optimizer.lr=0.03"])
    assert resolved(load_run(path)) == resolved(overridden)
    assert compose("periodic_average").parameters[0].every != 20
    path.write_text("recipe: periodic_average\nstrategy.parameters.0.every: 20\n")
    assert load_run(path).strategy == overridden.strategy
    path.write_text("recipe: periodic_average\nparameters: [{collective: broadcast, every: 20}]\n")
    [replaced] = load_run(path).strategy.parameters  # a list takes the place of the recipe's
    [whole] = compose({"parameters": [{"collective": "broadcast", "every": 20}]}).parameters
    assert replaced == whole


def test_a_file_can_be_based_on_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("batch_size: 8\nepochs: 3\nrecipe: periodic_average\nparameters.0.every: 20\n")
    second.write_text(f"recipe: {first}\nepochs: 4\n")
    run = load_run(second)
    assert (run.batch_size, run.epochs, run.strategy.parameters[0].every) == (8, 4, 20)
    first.write_text("batch_size: 8\n")
    assert resolved(load_run(second)) == resolved(load_run("sgd", ["batch_size=8", "epochs=4"]))


def test_a_reference_reaches_the_whole_file_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_TEST_SEED", "42")
    run = load_run(
        {"recipe": "sgd", "epochs": "${batch_size}", "batch_size": 3, "seed": "${oc.env:HOCKET_TEST_SEED}"}
    )
    assert (run.epochs, run.seed) == (3, 42)


@pytest.mark.parametrize("recipe", ["sgd", "agd", "local", "periodic_average"])
def test_what_is_resolved_is_complete_and_loads_to_the_same(recipe: str, tmp_path: Path) -> None:
    run = load_run(
        recipe, ["optimizer=adamw", "optimizer.lr=0.01", "task.hidden=16", "steps=3", "network.latency_s=2"]
    )
    plain = resolved(run)
    assert plain["optimizer"]["betas"] == [0.9, 0.999]
    assert plain["task"]["hidden"] == 16
    assert plain["task"]["label_smoothing"] == 0
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(plain))
    again = load_run(path)
    assert resolved(again) == plain
    assert again.strategy == run.strategy
    assert (again.steps, again.network, again.name) == (3, NetworkModel(latency_s=2.0), recipe)


def test_a_task_of_ones_own_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hocket_module.py").write_text("from hocket.task import Digits as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = load_run({"task": {"name": "my_hocket_module:Mine", "hidden": 7}})
    assert build_task(run) == Digits(hidden=7)
    of_digits = {
        **resolved(load_run({"task": {"name": "digits", "hidden": 7}}))["task"],
        "name": run.task.name,
    }
    assert resolved(run)["task"] == of_digits
    assert resolved(load_run(resolved(run))) == resolved(run)


def test_fields_of_a_task_of_ones_own_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enums, lists, and a field that nobody gives."""
    (tmp_path / "my_fields_module.py").write_text(
        "from dataclasses import dataclass, field\nfrom enum import Enum\nfrom hocket.task import Digits\n"
        "Kind = Enum('Kind', 'A B')\n"
        "@dataclass(frozen=True)\nclass Mine(Digits):\n    kind: Kind = Kind.A\n"
        "    sizes: list[int] = field(default_factory=lambda: [1, 2])\n    made: int = field(default=3, init=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = load_run({"task": {"name": "my_fields_module:Mine", "kind": "B"}})
    written = resolved(run)["task"]
    assert (written["kind"], written["sizes"], "made" in written) == ("B", [1, 2], False)
    again: Any = build_task(load_run(resolved(run)))
    assert (again, again.kind.name, again.made) == (build_task(run), "B", 3)


_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "epochs": st.integers(1, 10**9),
        "batch_size": st.integers(1, 10**9),
        "seed": st.integers(0, 2**63 - 1),
        "ranks": st.none() | st.integers(1, 65536),
        "steps": st.none() | st.integers(1, 10**9),
        "timeout_s": st.floats(min_value=1e-9, max_value=1e9) | st.integers(1, 10**6),
        "log_every": st.integers(1, 10**9),
        "transport": st.sampled_from([None, *TransportName]),
        "on_nonfinite": st.sampled_from(["error", "skip"]),
    },
)


@given(_SETTINGS)
def test_any_settings_are_kept_in_the_mapping_and_as_overrides(settings: dict[str, Any]) -> None:
    run = load_run({"recipe": "sgd", **settings})
    for key, value in settings.items():
        assert getattr(run, key) == value
    overrides = [
        f"{key}={yaml.safe_dump(value if not isinstance(value, str) else str(value))}"
        for key, value in settings.items()
    ]
    assert load_run({"recipe": "sgd"}, overrides) == run
