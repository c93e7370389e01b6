"""JSON as others read it: it has no NaN, so each stands as null with a text beside it, and comes back as a number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "loads", "without_nan"]

#: What follows the name of a value whose text stands beside it.
_TEXT = "_text"

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON: of `{"loss": nan}` it is `{"loss": null, "loss_text": "nan"}`."""
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Return what `dumps` was given; NaN and infinities as other programs write them are read, too.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def without_nan(value: Any) -> Any:
    """Return a value whose NaN and infinities are None, each with its text beside it in the mapping around it."""
    if isinstance(value, Mapping):
        found = {}
        for name, each in value.items():
            found[name] = without_nan(each)
            told = _told(each)
            if told is not None:
                found[f"{name}{_TEXT}"] = told
        return found
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if _told(value) is not None else value


def _told(value: Any) -> Any:
    """Return the text of a number that JSON lacks, or of a list the texts of those in it; None where it has all."""
    if isinstance(value, float):
        return None if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        texts = [_told(each) if isinstance(each, float) else None for each in value]
        return texts if any(texts) else None
    return None


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, each in value.items():
        original = name.removesuffix(_TEXT)
        if original != name and original in value and _holds_texts_of(value[original], each):
            continue
        found[name] = _number(_restored(each), value.get(f"{name}{_TEXT}"))
    return found


def _holds_texts_of(value: Any, told: Any) -> bool:
    """Return whether `told` is what stands beside a value that JSON lacks."""
    if value is None:
        return isinstance(told, str) and told in _NUMBERS
    if not (isinstance(value, list) and isinstance(told, list) and len(value) == len(told) and any(told)):
        return False
    return all(text is None or _holds_texts_of(each, text) for each, text in zip(value, told, strict=True))


def _number(value: Any, told: Any) -> Any:
    if not _holds_texts_of(value, told):
        return value
    if value is None:
        return _NUMBERS[told]
    return [_number(each, text) for each, text in zip(value, told, strict=True)]
