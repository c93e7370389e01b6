"""Files that no strategy is: few lines of YAML that would take all memory, or nest too deep to be read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import hocket
from hocket.config.source import parse_override
from hocket.errors import ConfigError

ALIASES = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("depth", [60, 200, 100_000])
@pytest.mark.parametrize("brackets", ["[]", ("{a: ", "}")])
def test_what_nests_deep_is_refused(depth: int, brackets: tuple[str, str]) -> None:
    opening, closing = brackets
    with pytest.raises(ConfigError, match="nested deeper than 50 levels") as caught:
        parse_override(f"optimizer={opening * depth}1{closing * depth}")
    assert "\n" not in str(caught.value)[-200:]


def test_aliases_that_multiply_are_refused() -> None:
    text = "{" + ", ".join(f"a: &a [{', '.join('x' * 9)}]\n{ALIASES}".splitlines()) + "}"
    with pytest.raises(ConfigError, match="aliases multiply to more than 1000000 values"):
        parse_override(f"optimizer={text}")


def test_aliases_that_are_few_are_read() -> None:
    assert parse_override("optimizer={a: &a [1, 2], b: [*a, *a]}").value == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
    }


@pytest.mark.parametrize("target", [None, 3, ["sgd"], b"sgd"])
def test_what_is_no_strategy_is_named(target: object) -> None:
    with pytest.raises(ConfigError) as caught:
        hocket.compose(target)  # type: ignore[arg-type]
    allowed = "a recipe's name, a YAML file, a mapping, or a Strategy"
    assert str(caught.value) == f"got {target!r} for a strategy; allowed: {allowed}"


@pytest.mark.parametrize("value", ["1", "{a: 1, b: [1, 2]}"])
def test_each_key_of_a_long_file_takes_as_long_as_of_a_short_one(value: str, tmp_path: Path) -> None:
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    keys = "".join(f"key{number}: {value}\n" for number in range(20_000 if value == "1" else 4_000))
    below.write_text(keys)
    above.write_text(f"recipe: {below}\n{keys}")
    start_s = time.process_time()
    with pytest.raises(ConfigError, match="key0: unknown key"):
        hocket.compose(str(above))
    assert time.process_time() - start_s < 12  # and hundreds of seconds, if each key looked at all others
