# ruff: noqa: E501 - the tables of messages read better unbroken
"""Every mistake in a configuration, and what its message says: source, key, given, allowed, suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import ConfigError, MissingPluginError
from hocket.installing import how_to_install
from hocket.plugin import Registry
from hocket.strategy import compose
from hocket.training.run import build_engine, build_task, load_run


def message_of(target: Any, overrides: Sequence[str] = (), kind: type[ConfigError] = ConfigError) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(target, overrides)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs: often", "epochs: got 'often'; allowed: an integer"),
        ("epochs: 1.5", "epochs: got 1.5; allowed: an integer"),
        ("epochs: true", "epochs: got true; allowed: an integer"),
        ("epochs: null", "epochs: got null; allowed: an integer"),
        ("epochs: [1]", "epochs: got [1]; allowed: an integer"),
        ("epochs: 0", "epochs: epochs must be 1 or more, not 0"),
        ("steps: -1", "steps: steps must be 1 or more, not -1"),
        ("ranks: many", "ranks: got 'many'; allowed: an integer or null"),
        ("seed: -1", "seed: seed must be 0 or more, not -1"),
        ("timeout_s: soon", "timeout_s: got 'soon'; allowed: a number, or a number with s, ms or us, such as 200ms"),
        ("timeout_s: .inf", "timeout_s: timeout_s must be finite and more than 0, not inf"),
        ("transport: smoke", "transport: got 'smoke'; allowed: one of mpi, torch, virtual"),
        ("on_nonfinite: MAYBE", "on_nonfinite: got 'MAYBE'; allowed: one of error, skip"),
        ("network: fast", "network: got 'fast'; allowed: a mapping of latency_s, bandwidth_bits_per_s"),
        ("network: {latency: 1}", "network.latency: unknown key. Did you mean 'latency_s'? Allowed: latency_s, bandwidth_bits_per_s, poll_s"),
        ("network: {latency_s: -1}", "network.latency_s: latency_s must be finite and at least 0, not -1.0"),
        ("network: {bandwidth_bits_per_s: 1GB}", "network.bandwidth_bits_per_s: got '1GB'; allowed: a number, or a number with kbit, mbit, gbit or tbit, such as 1gbit"),
        ("network: {bandwidth_bits_per_s: 0}", "network.bandwidth_bits_per_s: bandwidth_bits_per_s must be positive, not 0.0"),
        ("delays: {ranks: [0]}", "delays: this mapping has no `name`; write {name: ..., ranks: [0]}, or a name alone"),
        ("delays: {name: fixd}", "delays.name: there is no delays 'fixd'. Did you mean 'fixed'? There are: file, fixed, linear_skew, random_subset, shifting_skew."),
        ("delays: {name: fixed, ranks: 3, seconds: 1}", "delays.ranks: got 3; allowed: a list; each item is an integer"),
        ("delays: {name: fixed, ranks: [1, 1], seconds: 1}", "delays.ranks: ranks is [1, 1]; allowed: different ranks, from 0"),
        ("delays: {name: fixed, ranks: [1], seconds: .inf}", "delays.seconds: seconds is inf; allowed: 0 or more, finite"),
        ("delays: {name: random_subset, count: -1, seconds: 1}", "delays.count: count is -1; allowed: 0 or more"),
        ("delays: {name: random_subset, seconds: 1}", "delays.count: missing; allowed: an integer"),
        ("delays: {name: shifting_skew, shortest_s: 0.4, longest_s: 0.05}", "delays.longest_s: longest_s is 0.05, but must be at least shortest_s, which is 0.4"),
        ("delays: {name: file, file: /nowhere.csv}", "delays.file: file /nowhere.csv cannot be read: No such file or directory"),
        ("compute: {step_s: -1}", "compute.step_s: step_s is -1.0; allowed: 0 or more, finite"),
        ("compute: {per_element: 1}", "compute.per_element: unknown key. Did you mean 'element_s'? Allowed: step_s, element_s"),
        ("phases: {1.5: {}}", "line 1, column 10: not valid YAML: the key 1.5 is not text"),
        ("phases: {ten: {}}", "phases.ten: 'ten' is not a number of steps; allowed: whole numbers from 0, such as {500: {...}}"),
        ("phases: {10: [1]}", "phases.10: got [1]; allowed: overrides, such as {gradients.0.overlap: none}"),
        ("phases: {10: {epochs: 3}}", "phases.10.epochs: not a part of a strategy; allowed: samples, gradients, parameters"),
        ("phases: {10: {samples: null}}", "phases.10.samples: the exchange of samples cannot change during a run"),
        ("task: 3", "task: got 3; allowed: a name, or a mapping with a name and arguments"),
        ("optimizer: {name: null}", "optimizer.name: got null; allowed: a name"),
        ("strategy: sgd", "strategy: got 'sgd'; allowed: a mapping of samples, gradients, parameters"),
        ("strategy: {gradient: []}", "strategy.gradient: unknown key. Did you mean 'gradients'? Allowed: samples, gradients, parameters"),
        ("strategy: {gradients: 1}", "strategy.gradients: got 1; allowed: a list of exchanges, such as [{collective: allreduce}]"),
        ("strategy: {gradients: [{over: world}]}", "strategy.gradients.0.collective: missing; allowed: allreduce, broadcast"),
        ("gradients: [{collective: alreduce}]", "gradients.0.collective: there is no collective 'alreduce'. Did you mean 'allreduce'? There are: allreduce, broadcast, gossip, reduce, sparse_allreduce."),
        ("gradients: [{collective: complete}]", "gradients.0.collective: 'complete' is a topology, not a collective. There are: allreduce, broadcast, gossip, reduce, sparse_allreduce."),
        ("gradients: [{collective: {root: 1}}]", "gradients.0.collective: this mapping has no `name`; write {name: ..., root: 1}, or a name alone"),
        ("gradients: [{collective: allreduce, evry: 2}]", "gradients.0.evry: unknown key. Did you mean 'every'? Allowed: collective, over, topology, compressor, segments, every, overlap, progress, outer, delay, merge, stagger, offset, buffers, offload"),
        ("parameters: [{collective: allreduce, every: often}]", "parameters.0.every: got 'often'; allowed: an integer or log2_ranks"),
        ("parameters: [{collective: allreduce, every: true}]", "parameters.0.every: got true; allowed: an integer or log2_ranks"),
        ("gradients: [{collective: {name: allreduce, root: 1}}]", "gradients.0.collective.root: unknown key; allowed: algorithm"),
        ("parameters: [{collective: {name: broadcast, root: -1}}]", "parameters.0.collective.root: root must be 0 or more, not -1"),
        ("parameters: [{collective: allreduce, overlap: often}]", "parameters.0.overlap: got 'often'; allowed: one of none, backward, forward"),
        ("samples: shuffle", "samples: there is no samples 'shuffle'. There are: none."),
        ("gradients: []\nstrategy: {}", "gradients is given next to strategy: put it under strategy"),
        ("epochs: ${epoch}", "epochs: got '${epoch}': Interpolation key 'epoch' not found"),
        ("epochs: ???", "epochs: got '???': Missing mandatory value: epochs"),
        ("gradients: [{collective: allreduce, every: '${x}'}]", "gradients.0.every: got '${x}': Interpolation key 'x' not found"),
        ("epoch: 3", "epoch: unknown key. Did you mean 'epochs'? Allowed: name, "),
        ("recipe: sdg", "recipe: there is no recipe 'sdg'. Did you mean 'sgd' or 'sgp'? There are: agd, dpsgd, hierarchical_sgd, local, overlap_sgp, periodic_average, sgd, sgp."),
        ("recipe: [sgd]", "recipe: got ['sgd']; allowed: a recipe's name, or a file's"),
        ("recipe: absent.yaml", "recipe: absent.yaml: cannot read the file: No such file or directory"),
        ("recipe: periodic_average\nparameters.1.every: 2", "parameters.1: parameters has 1 exchange, numbered 0 to 0"),
        ("recipe: periodic_average\nstrategy: {}\nparameters.0.every: 2", "parameters.0.every is given next to strategy: put it under strategy"),
        ("recipe: periodic_average\nparameters: [{every: 2}]", "parameters.0.collective: missing; allowed: allreduce, broadcast, gossip, reduce, sparse_allreduce. This list replaces the recipe's whole list of exchanges. To change only one key of the recipe's exchange, write this in its place: `parameters.0.every: 2`"),
        ("recipe: periodic_average\nparameters: [{evry: 2}]", "parameters.0.evry: unknown key. Did you mean 'every'? Allowed: collective, over, topology, compressor, segments, every, overlap, progress, outer, delay, merge, stagger, offset, buffers, offload"),
        ("epochs: 1\nepochs: 2", "line 2, column 1: not valid YAML: the key 'epochs' is given twice"),
        ("a: [1, 2\nb: 3", "line 2, column 2: not valid YAML: "),
        ("- sgd", "got ['sgd']; allowed: a mapping, such as strategy: {gradients: [...]}"),
        ("", "got nothing; allowed: a mapping"),
        ("epochs: 2001-99-01", "not valid YAML: month must be in 1..12"),
        ("a: \x07", "not valid YAML: unacceptable character #x0007"),
    ],
)  # fmt: skip
def test_a_file_is_refused_with_its_name(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = message_of(path)
    assert message.startswith(f"{path}: {expected}")
    assert message_of(str(path)) == message


def test_a_suggestion_at_the_root_knows_the_slots() -> None:
    assert message_of({"gradient": []}).startswith(
        "mapping: gradient: unknown key. Did you mean 'gradients'? "
    )
    assert message_of({"epoch": 1}).startswith(
        "mapping: epoch: unknown key. Did you mean 'epochs'? Allowed: "
    )


def test_a_missing_plugin_keeps_its_type_and_gets_a_place() -> None:
    message = message_of({"gradients": [{"collective": "eager.partial_allreduce"}]}, kind=MissingPluginError)
    install = how_to_install("hocket-eager")
    assert message == f"mapping: gradients.0.collective: plugin 'eager' is not installed: {install}"
    mapping = {"parameters": [{"collective": "allreduce", "topology": {"name": "crossover.fair_random"}}]}
    message = message_of({"strategy": mapping}, kind=MissingPluginError)
    assert message.startswith(
        "mapping: strategy.parameters.0.topology.name: plugin 'crossover' is not installed"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gradients.0.overlap", "not of the form KEY=VALUE, such as gradients.0.overlap=backward"),
        ("=3", "not of the form KEY=VALUE"),
        ("gradients..overlap=none", "not of the form KEY=VALUE"),
        ("epochs=[1", "line 1, column 3: not valid YAML: "),
        ("gradients.1.every=1", "gradients.1: gradients has 1 exchange, numbered 0 to 0"),
        ("strategy.gradients.-1.every=1", "strategy.gradients.-1: strategy.gradients has 1 exchange, numbered 0 to 0"),
        ("gradients.first=1", "gradients.first: gradients has 1 exchange, numbered 0 to 0"),
        ("epochs.x=1", "epochs: got {'x': 1}; allowed: an integer"),
        ("name.x=1", "name: got "),
        ("optimizer.lr.x=1", "optimizer.lr is 0.1, which cannot have keys"),
        ("gradients.0.overlpa=none", "gradients.0.overlpa: unknown key. Did you mean 'overlap'? Allowed: collective, over"),
        ("gradients.0.segments={name: bytes, size_mb: 0}", "gradients.0.segments.size_mb: size_mb must be finite and more than 0, not 0.0"),
        ("gradients.0.segments.size=1", "gradients.0.segments.size: unknown key. Did you mean 'size_mb'? Allowed: size_mb"),
        ("seed=abc", "seed: got 'abc'; allowed: an integer"),
        ("missed=sum", "missed: unknown key. Did you mean "),
        ("every=30", "every: unknown key here; write checkpoint.every"),
        ("lr=30", "lr: unknown key here; write optimizer.lr"),
        ("algorithm=ring", "algorithm: unknown key here; write strategy.gradients.0.collective.algorithm"),
        ("push_sum=true", "push_sum: unknown key here; it is a key of collective gossip, of which this run has none"),
        ("network.bandwith=1", "network.bandwith: unknown key. Did you mean 'bandwidth_bits_per_s'? Allowed: latency_s, bandwidth_bits_per_s, poll_s"),
        ("delays={name:fixed}", "line 1, column 2: not valid YAML: 'name:fixed' needs a space after its colon: write name: fixed"),
        ("strategy=agd", "strategy: got 'agd'; allowed: a mapping of samples, gradients, parameters. To use a recipe, name it first, as in `hocket run agd`"),
        ("recipe=agd", "no effect after recipe sgd: write agd instead of sgd"),
        ("phases.x=1", "phases.x: 'x' is not a number of steps; allowed: whole numbers from 0"),
        ("phases={5: {gradients.0.every: often}}", "phases.5: gradients.0.every: got 'often'; allowed: an integer"),
    ],
)  # fmt: skip
def test_an_override_is_refused_with_its_text(override: str, expected: str) -> None:
    assert message_of("sgd", [override]).startswith(f"override {override!r}: {expected}")


@given(count=st.integers(0, 5), index=st.integers(0, 50))
def test_an_index_out_of_range_is_told_how_many_there_are(count: int, index: int) -> None:
    target = {"parameters": [{"collective": "allreduce"}] * count}
    override = f"parameters.{index}.every=2"
    if index < count:
        assert load_run(target, [override]).strategy.parameters[index].every == 2
        return
    exchanges = f"{count} exchange{'s' * (count != 1)}"
    assert f"parameters.{index}: parameters has {exchanges}" in message_of(target, [override])


def test_a_strategy_takes_no_settings_of_a_run() -> None:
    with pytest.raises(ConfigError) as caught:
        compose("sgd", "epochs=3")
    assert str(caught.value) == (
        "override 'epochs=3': epochs is not a part of a strategy; allowed: samples, gradients, parameters, "
        "synchronous_steps"
    )
    with pytest.raises(
        ConfigError, match=r"every is not a part of a strategy. Did you mean parameters.0.every\? Allowed"
    ):
        compose("periodic_average", "every=8")


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({1.5: 2}, "mapping: root: the key 1.5 is not text"),
        ({"strategy": {"gradients": [{2.5: 3}]}}, "mapping: strategy.gradients.0: the key 2.5 is not text"),
        ({"gradients": [{"collective": object}]}, "mapping: gradients.0.collective: got <class 'object'>; allowed: mappings, lists"),
    ],
)  # fmt: skip
def test_a_mapping_holds_plain_values(mapping: Any, expected: str) -> None:
    assert message_of(mapping).startswith(expected)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    absent = tmp_path / "absent.yaml"
    assert message_of(absent) == f"{absent}: cannot read the file: No such file or directory"
    assert message_of("absent.yml") == "absent.yml: cannot read the file: No such file or directory"
    assert message_of(tmp_path) == f"{tmp_path}: cannot read the file: Is a directory"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    assert message_of(binary) == f"{binary}: cannot read the file: not UTF-8 text"


def test_an_unknown_recipe_is_answered_with_the_list() -> None:
    assert message_of("adg") == (
        "there is no recipe 'adg'. Did you mean 'agd'? There are: agd, dpsgd, hierarchical_sgd, local, overlap_sgp, periodic_average, sgd, sgp."
    )


def test_a_file_based_on_itself_is_refused(tmp_path: Path) -> None:
    registry = Registry(lambda: [])
    for name, base in (("first", "second"), ("second", "first")):
        (tmp_path / f"{name}.yaml").write_text(f"recipe: {base}\n")
        registry.recipe(tmp_path / f"{name}.yaml")
    with pytest.raises(
        ConfigError, match=r"^recipe second: recipe: first -> second -> first is based on itself$"
    ):
        load_run({"recipe": "first"}, registry=registry)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "digit",
            "mapping: task: there is no task 'digit'. Did you mean 'digits'? There are: digits.",
        ),
        (
            {"name": "digits", "hiden": 3},
            "mapping: task.hiden: unknown key. Did you mean 'hidden'? Allowed: ",
        ),
        ({"name": "digits", "hidden": "x"}, "mapping: task.hidden: got 'x'; allowed: an integer"),
        ("no_such_module_of_mine:task", "mapping: task.name: no module 'no_such_module_of_mine'"),
    ],
)
def test_a_task_is_refused_when_it_is_built(task: Any, expected: str) -> None:
    run = load_run({"task": task})
    with pytest.raises(ConfigError) as caught:
        build_task(run)
    assert str(caught.value).startswith(expected)


def test_an_engine_is_refused_when_it_is_built() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^override 'engine=pipeline': engine: there is no engine 'pipeline'\. There are: data",
    ):
        build_engine(load_run("sgd", ["engine=pipeline"]))


@pytest.mark.parametrize("window", [[0, [1]], [[0], 1], [2, 1], [1]])
def test_a_trace_s_window_that_is_none_is_refused(window: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"trace_steps"):
        load_run({"trace_steps": window})


def test_a_list_among_integers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"delays\.ranks: got \[\[0\]\]; allowed: a list; each item is an integer"
    ):
        load_run({"delays": {"name": "fixed", "ranks": [[0]], "seconds": 0.1}})
