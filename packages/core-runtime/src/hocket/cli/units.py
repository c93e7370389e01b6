"""Numbers with units, as the commands print them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_seconds"]


def format_bytes(nbytes: float) -> str:
    """Write bytes with three significant digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Write seconds with three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
