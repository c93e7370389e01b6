"""Whatever a user writes, what comes back is a configuration or a ConfigError."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.config.settings import ROOT_KEYS
from hocket.config.source import SLOTS
from hocket.errors import ConfigError
from hocket.training.run import load_run

_EXCHANGE_KEYS = ("collective", "over", "topology", "compressor", "segments", "every", "overlap")
_WORDS = st.sampled_from(
    ["allreduce", "broadcast", "world", "none", "bytes", "backward", "${seed}", "${", "???"]
)
_ODD = st.sampled_from(["{name: bytes}", "[]", "{}", "{a: {b: 1}}", "1e-3", "2001-01-01", "&a [*a]"])
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | _WORDS | st.text(max_size=5)
_KEYS = st.sampled_from([*_EXCHANGE_KEYS, "name", "root", "size_mb", "lr"]) | st.text(max_size=3)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)
_EXCHANGES = st.lists(
    st.fixed_dictionaries(
        {"collective": st.just("allreduce")}, optional=dict.fromkeys(_EXCHANGE_KEYS[1:], _VALUES)
    )
)
_SLOTS = {"gradients": _EXCHANGES, "parameters": _EXCHANGES, "samples": _VALUES}
_PARTS = st.sampled_from([*SLOTS, *_EXCHANGE_KEYS, "strategy", "optimizer", "name", "0", "1", "-1"])


@given(st.dictionaries(st.sampled_from(ROOT_KEYS) | st.text(max_size=3), _VALUES, max_size=4))
def test_any_settings(mapping: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        load_run(mapping)


@given(st.fixed_dictionaries({}, optional=_SLOTS))
def test_any_strategy(mapping: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        load_run({"strategy": mapping})


@given(st.lists(_PARTS, max_size=4), st.text(max_size=8) | _WORDS | _ODD)
def test_any_override(keys: list[str], value: str) -> None:
    with contextlib.suppress(ConfigError):
        load_run("agd", [".".join(keys) + "=" + value])


@pytest.mark.parametrize(
    "text",
    [
        "epochs: &a [*a]",
        "phases: &a {b: *a}",
        "epochs: 2001-01-01",
        "epochs: !!binary aGVsbG8=",
        "epochs: !!set {a, b}",
        "epochs: !!python/object:os.system {}",
        "? [a]\n: b",
        "? {a: b}\n: c",
        "---\na: 1\n---\nb: 2",
        "a: *nobody",
        "seed: 1_000_000_000_000_000_000_000_000",
        "timeout_s: -.inf",
        "timeout_s: .nan",
    ],
)
def test_odd_yaml_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: "):
        load_run(path)


def test_yaml_may_merge_mappings_and_repeat_anchors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "network: &n {latency_s: 3}\noptimizer: {<<: *n, name: sgd}\ntask: {name: digits, n: *n}\n"
    )
    run = load_run(path)
    assert run.optimizer.arguments == {"latency_s": 3}
    assert run.task.arguments == {"n": {"latency_s": 3}}
