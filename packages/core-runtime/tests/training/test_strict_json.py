"""JSON that everybody reads, and gives back what was written."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hocket.strict_json import dumps, loads

KEYS = st.text(st.characters(exclude_characters="_"), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return both_nan or (type(one) is type(other) and bool(one == other))


@given(st.dictionaries(KEYS, st.lists(st.floats(), max_size=3) | st.floats() | VALUES, max_size=3))
def test_every_value_is_strict_json_and_numbers_come_back(values: dict[str, Any]) -> None:
    text = dumps(values)
    json.loads(text, parse_constant=refuse)
    flat = {key: value for key, value in values.items() if _is_flat(value)}
    assert same({key: loads(text)[key] for key in flat}, flat)


def _is_flat(value: Any) -> bool:
    """Whether numbers that JSON lacks stand in a mapping, or in a list in one, as they do in metrics."""
    return not isinstance(value, dict | list) or (
        isinstance(value, list) and all(isinstance(each, float) for each in value)
    )


def test_the_text_stands_beside() -> None:
    assert json.loads(dumps({"loss": math.nan, "of_ranks": [1.0, -math.inf], "step": 3})) == {
        "loss": None,
        "loss_text": "nan",
        "of_ranks": [1.0, None],
        "of_ranks_text": [None, "-inf"],
        "step": 3,
    }


def test_a_run_that_diverges_leaves_strict_json_and_compares_as_what_it_is(
    hocket: Callable[..., Any], tmp_path: Path
) -> None:
    given: tuple[str, ...] = (
        "steps=6",
        "log_every=2",
        "optimizer={name: sgd, lr: 1.0e+30}",
        "loggers=[csv]",
        "--trace",
        "--report",
    )
    given += ("--transport", "virtual", "-n", "2", "-q", "--out", str(tmp_path / "RUN"))
    assert hocket("run", "local", *given).status == 0
    for name in ("summary.json", "run.json"):
        json.loads((tmp_path / "RUN" / name).read_text(), parse_constant=refuse)
    json.loads(gzip.decompress((tmp_path / "RUN" / "trace.json.gz").read_bytes()), parse_constant=refuse)
    lines = (tmp_path / "RUN" / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line, parse_constant=refuse) for line in lines][-1]
    assert (last["train_loss"], last["train_loss_text"]) == (None, "nan")
    with (tmp_path / "RUN" / "metrics.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))[-1]
    assert (cells["train_loss"], cells["train_loss_text"]) == ("", "nan")
    compared = hocket("compare", str(tmp_path / "RUN"), "--metric", "train_loss")
    assert (compared.status, compared.out.split()[compared.out.split().index("RUN") + 1]) == (0, "nan")
