"""The site's generated parts, a Sphinx extension: a directive for tables, and docstrings as Sphinx reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["setup"]


def literal_blocks(lines: list[str]) -> list[str]:
    """Return a docstring's lines with `::` before each block that is indented as code below a sentence."""
    marked = list(lines)
    for place in range(2, len(lines)):
        above, blank, line = lines[place - 2 : place + 1]
        deeper = len(line) - len(line.lstrip()) >= 4 + len(above) - len(above.lstrip())
        if line.strip() and not blank.strip() and above.strip() and deeper:
            marked[place - 2] = re.sub(r"::?$", "", above) + "::"
    return marked


def _prepare(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = literal_blocks(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what the pages need."""
    # Before napoleon, which indents what it makes of sections.
    app.connect("autodoc-process-docstring", _prepare, priority=100)
    return {"parallel_read_safe": True}
