"""The combinations of a sweep: `KEY=VALUE,VALUE ...` as runs with names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hocket.config.settings import TransportName
from hocket.config.source import based_on, parse_override
from hocket.errors import ConfigError
from hocket.plugin import default_registry
from hocket.training.run import RunConfig, load_run

_STRATEGY = "strategy"
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "\"'"
_UNNAMED = "run"


@dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    Attributes:
        name: its folder's name: the keys with several values and this run's values; for a strategy the value alone.
        run: the run, with its number of ranks.
    """

    name: str
    run: RunConfig


def combinations(
    target: str, arguments: Sequence[str], ranks: int | None, transport: str | None
) -> list[Combination]:
    """Return every combination of the values given, the last key's changing first.

    Args:
        target: a recipe's name or a file.
        arguments: `KEY=VALUE,VALUE`; `strategy` takes recipes' names and files, each with overrides of its own
            behind it: `strategy=sgd,mine.yaml,diloco parameters.0.every=20`.
        ranks: the number of ranks of each run; None for the target's, or 1.
        transport: the transport of all runs; None for the target's.

    Raises:
        ConfigError: a key or a value that a run cannot have, or one that stands twice.
        CompositionError: a strategy that is not defined for this number of ranks.
    """
    load_run(target)  # so that errors in a file name the file
    return [
        Combination(name, _load(target, chosen, ranks, transport))
        for name, chosen in chosen_values(arguments).items()
    ]


def chosen_values(arguments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return every combination of the values given as values by key, by the name of its folder.

    Args:
        arguments: as of `combinations`.

    Raises:
        ConfigError: an argument has another form, or a key or a value stands twice.
    """
    choices = [_choices(argument) for argument in arguments]
    keys = [key for key, _ in choices]
    for key, given in choices:
        if key == "recipe":
            asked = ",".join(given)
            raise ConfigError(f"recipe={asked}: in a sweep, write strategy={asked}")
        if keys.count(key) > 1:
            raise ConfigError(f"{key} is given twice: give it once, with commas between its values")
    swept = [key for key, values in choices if len(values) > 1]
    found: dict[str, dict[str, str]] = {}
    for values in product(*(values for _, values in choices)):
        chosen = dict(zip(keys, values, strict=True))
        found[_distinct(_name({key: chosen[key] for key in swept}), found)] = chosen
    return found


def has_several_values(argument: str) -> bool:
    """Return whether a sweep would read `KEY=VALUE` as several values, separated by commas."""
    return len(_split(argument.partition("=")[2], ",")) > 1


def target_and_overrides(text: str, others: Sequence[str], label: str) -> tuple[str, list[str]]:
    """Return the parts of `diloco parameters.0.every=20`: a recipe's name or a file, and all overrides.

    Args:
        text: the parts, separated by blanks.
        others: further overrides.
        label: the text's name in errors.

    Raises:
        ConfigError: one of its own overrides has the key of another.
    """
    target, *own = _words(text)
    given = {_key(override) for override in others}
    for override in own:
        if (key := _key(override)) in given:
            raise ConfigError(f"{key} is given twice: in {label}, and by itself")
    return target, [*own, *others]


def _key(override: str) -> str:
    """Return an override's key, without the `strategy.` that a strategy's keys may begin with."""
    return override.partition("=")[0].strip().removeprefix(f"{_STRATEGY}.")


def _load(target: str, chosen: dict[str, str], ranks: int | None, transport: str | None) -> RunConfig:
    overrides = [f"{key}={value}" for key, value in chosen.items() if key != _STRATEGY]
    strategy = chosen.get(_STRATEGY)
    if strategy is None:
        run = load_run(target, overrides)
    elif not _names_recipe(strategy):
        run = load_run(target, [f"{_STRATEGY}={strategy}", *overrides])
    else:
        recipe, overrides = target_and_overrides(strategy, overrides, f"strategy={strategy}")
        run = load_run(based_on(target, recipe, default_registry()), overrides)
    run = replace(run, ranks=ranks or run.ranks or 1)
    if transport is not None:
        run = replace(run, transport=TransportName(transport))
    assert run.ranks is not None
    run.check_size(run.ranks)
    return run


def _choices(argument: str) -> tuple[str, list[str]]:
    """Return a key and its values, which commas outside of brackets and quotes separate."""
    parse_override(argument.partition("=")[0] + "=0" if "=" in argument else argument)
    key, _, text = argument.partition("=")
    values = _split(text, ",")
    for value in values:
        if len(values) > 1 and not value:
            raise ConfigError(f"{argument!r}: a value is missing before or after a comma")
        if values.count(value) > 1:
            raise ConfigError(f"{argument!r}: the value {value} is given twice")
    return key.strip(), values


def _split(text: str, separator: str) -> list[str]:
    """Return the stripped parts of a text, which separators outside of brackets and quotes separate."""
    parts, depth, quote = [""], 0, ""
    for letter in text.strip():
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        else:
            depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == separator and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _names_recipe(strategy: str) -> bool:
    """Return whether a value of `strategy` names a recipe or a file instead of being written out."""
    return bool(strategy) and not strategy.startswith(tuple(_OPENING))


def _words(text: str) -> list[str]:
    return [word for word in _split(text, " ") if word]


def _name(chosen: dict[str, str]) -> str:
    parts = []
    for key, value in chosen.items():
        if key == _STRATEGY and _names_recipe(value):
            recipe, *own = _words(value)
            parts += [recipe.removesuffix(".yaml").removesuffix(".yml"), *own]
        else:
            parts.append(f"{key}={value}")
    return re.sub(r"[^\w.,=+-]+", "-", ",".join(parts)).strip("-.") or _UNNAMED


def _distinct(name: str, taken: Collection[str]) -> str:
    places = (f"{name}-{place}" for place in range(2, len(taken) + 3))
    return next(each for each in (name, *places) if each not in taken)
