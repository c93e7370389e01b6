"""Tables: drawn with lines on a terminal, and as aligned plain text, in which nothing is cut off, elsewhere."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

# Characters between two columns, and around them: spaces, or lines with a space on each side.
_PLAIN_GAP = 2
_DRAWN_GAP = 4
_NARROWEST = 12


def show_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    width: int | None = None,
    drawn: bool | None = None,
) -> None:
    """Print a table.

    Args:
        headers: the columns' names.
        rows: the rows' cells, one for each column.
        numbers: the columns that are aligned at the right.
        width: the most characters of a line; a table that does not fit is turned, if that helps, so that each row
            becomes a column. Columns that do not fit follow in further tables, with the first column repeated. None
            for the terminal's width, and for no limit elsewhere.
        drawn: draw lines; None where the output is a terminal.
    """
    drawn = sys.stdout.isatty() if drawn is None else drawn
    if width is None and drawn:
        width = shutil.get_terminal_size().columns
    lines = [list(headers), *map(list, rows)]
    gap = _DRAWN_GAP if drawn else _PLAIN_GAP
    parts = _parts(lines, width, gap)
    turned = _parts([list(column) for column in zip(*lines, strict=True)], width, gap)
    if len(turned) < len(parts):
        parts, numbers = turned, ()
    for place, part in enumerate(parts):
        if place and not drawn:
            print()
        (_show_rich if drawn else _show_plain)(part[0], part[1:], numbers)


def _parts(lines: list[list[str]], width: int | None, gap: int) -> list[list[list[str]]]:
    """Return tables of at most `width` characters whose columns are those of one table of `lines`."""
    if width is None:
        return [lines]
    first, *others = (list(column) for column in zip(*lines, strict=True))
    first = [textwrap.fill(cell, max(width // 3, _NARROWEST), break_on_hyphens=False) for cell in first]
    parts = [[first]]
    room = max(width - _width(first) - 3 * gap, _NARROWEST)
    for cells in others:
        column = [textwrap.fill(cell, room, break_on_hyphens=False) for cell in cells]
        if len(parts[-1]) > 1 and sum(map(_width, (*parts[-1], column))) + gap * (len(parts[-1]) + 1) > width:
            parts.append([first])
        parts[-1].append(column)
    return [[list(line) for line in zip(*part, strict=True)] for part in parts]


def _width(column: Sequence[str]) -> int:
    return max(len(line) for cell in column for line in cell.split("\n"))


def _show_plain(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    lines = [headers, *rows]
    widths = [_width(column) for column in zip(*lines, strict=True)]
    for line in lines:
        for parts in zip_longest(*(cell.split("\n") for cell in line), fillvalue=""):
            cells = (
                cell.rjust(width) if header in numbers else cell.ljust(width)
                for cell, width, header in zip(parts, widths, headers, strict=True)
            )
            print("  ".join(cells).rstrip())


def _show_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for header in headers:
        table.add_column(
            header,
            justify="right" if header in numbers else "left",
            no_wrap=header == headers[0],
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)
