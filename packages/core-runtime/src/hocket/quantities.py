"""Quantities as people write them: `200ms`, `1gbit`, `25M`; for the command line and for keys of a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeVar

from hocket.errors import UserError, shortened

_NUMBER = r"(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
#: A number without a unit above this many seconds was more likely meant in ms or us.
_LONGEST_S = 60.0
#: A bound on counts: more than any model has, and few enough to count its bytes.
_MOST = 1e18

T = TypeVar("T")

#: The allowed forms, for errors.
SECONDS = "a number with s, ms or us, such as 200ms"
BITS = "a number with kbit, mbit, gbit or tbit, such as 1gbit"


def seconds(text: str, longest_s: float = _LONGEST_S) -> float:
    """Return the seconds that a text such as `200ms` means; a number without a unit is in seconds.

    Args:
        text: a number with or without a unit.
        longest_s: the most seconds that a number without a unit may mean.

    Raises:
        ValueError: the text is no such number, or has no unit and is above `longest_s`; says what to write.
    """
    found = re.fullmatch(_NUMBER + r"\s*(s|ms|us|µs|)", text.strip())
    if found is None or float(found[1]) == math.inf:
        raise ValueError(f"got {shortened(repr(text))}; allowed: {SECONDS}")
    number, unit = float(found[1]), found[2].replace("µ", "u")
    if not unit and number > longest_s:
        smaller = ("us", "ms") if longest_s <= 1 else ("ms",)
        likely = ", ".join(f"{found[1]}{each}" for each in smaller)
        raise ValueError(f"got {text!r}, which would be {found[1]} seconds: write {likely} or {found[1]}s")
    return number / _PER_SECOND[unit or "s"]


def bits_per_second(text: str) -> float:
    """Return the bits per second that a text such as `1gbit` means.

    Raises:
        ValueError: the text is no such number, or has no unit; says what to write.
    """
    found = re.fullmatch(_NUMBER + r"\s*([kmgt]?bit)(?:/s)?", text.strip().lower())
    bits = 0.0 if found is None else float(found[1]) * _BITS[found[2]]
    if not 0 < bits < math.inf:
        raise ValueError(f"got {shortened(repr(text))}; allowed: {BITS}")
    return bits


def count(text: str) -> float:
    """Return the number that a text such as `25M` means.

    Raises:
        ValueError: the text is no such number; says what to write.
    """
    found = re.fullmatch(_NUMBER + "([kmbg]?)", text.strip().lower())
    number = 0.0 if found is None else float(found[1]) * _COUNTS[found[2]]
    if not 0 < number < _MOST:
        raise ValueError(f"got {shortened(repr(text))}; allowed: a number such as 25M or 1.3B")
    return number


def read(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return the value that the text of a command's option means.

    Args:
        option: the option's name, such as `--step`.
        parse: one of this module's functions, or another that raises ValueError.
        text: the option's value.

    Raises:
        UserError: `parse` refuses the text; names the option.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def unit_of_key(key: str) -> str:
    """Return the units that a number may have at a key, by the key's last part; empty for none."""
    if key.endswith("_bits_per_s"):
        return BITS
    return SECONDS if key == "seconds" or key.endswith("_s") else ""


def format_bytes(nbytes: float) -> str:
    """Return bytes as text with three significant digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return seconds as text with three significant digits, and as whole seconds from 1000 on."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bits_per_second(bits: float) -> str:
    """Return bits per second as text with three significant digits."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def format_count(number: int) -> str:
    """Return a number as text with three significant digits, such as 25.0 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:#.3g}".rstrip(".") + f" {unit}"
    return str(number)
