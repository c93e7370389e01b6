"""Strict JSON, which has no NaN: one is written as null with a text beside it, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

#: The suffix of the name under which a value's text stands beside it.
_TEXT = "_text"

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: object, indent: int | None = None) -> str:
    """Return a value as strict JSON: of `{"loss": nan}` it is `{"loss": null, "loss_text": "nan"}`."""
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Return the value that `dumps` has written; reads NaN and infinities of other programs, too.

    Raises:
        ValueError: the text is no JSON.
    """
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def without_nan(value: Any) -> Any:
    """Return a value with None in place of NaN and infinities, and their texts beside them in the mapping."""
    if isinstance(value, Mapping):
        found = {}
        for name, each in value.items():
            found[name] = without_nan(each)
            text = _text_of(each)
            if text is not None:
                found[f"{name}{_TEXT}"] = text
        return found
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if _text_of(value) is not None else value


def _text_of(value: object) -> object:
    """Return the text of NaN or an infinity, or a list's texts; None for everything that JSON can express."""
    if isinstance(value, float):
        return None if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        texts = [_text_of(each) if isinstance(each, float) else None for each in value]
        return texts if any(texts) else None
    return None


def _restored(value: object) -> object:
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


def _holds_texts_of(value: object, texts: object) -> bool:
    """Return whether `texts` holds the texts of numbers that JSON lacks, in place of which `value` has None."""
    if value is None:
        return isinstance(texts, str) and texts in _NUMBERS
    if not (isinstance(value, list) and isinstance(texts, list) and len(value) == len(texts) and any(texts)):
        return False
    return all(text is None or _holds_texts_of(each, text) for each, text in zip(value, texts, strict=True))


def _number(value: object, texts: object) -> object:
    if not _holds_texts_of(value, texts):
        return value
    if isinstance(texts, str):
        return _NUMBERS[texts]
    assert isinstance(value, list)
    assert isinstance(texts, list)
    return [_number(each, text) for each, text in zip(value, texts, strict=True)]
