"""Tables: drawn with lines on a terminal; elsewhere aligned plain text, in which nothing is cut off."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["format_bytes", "format_seconds", "show_table"]


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        headers: the columns' names.
        rows: as many cells each as there are columns.
        numbers: the columns that are aligned at the right.
    """
    if sys.stdout.isatty():
        _show_rich(headers, rows, numbers)
        return
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        cells = (
            cell.rjust(width) if header in numbers else cell.ljust(width)
            for cell, width, header in zip(line, widths, headers, strict=True)
        )
        print("  ".join(cells).rstrip())


def _show_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for header in headers:
        table.add_column(
            header, justify="right" if header in numbers else "left", no_wrap=header == headers[0]
        )
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


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
