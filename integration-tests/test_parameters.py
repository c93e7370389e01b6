"""Every exchange of parameters that the slots allow: collectives, topologies, compressors, overlaps and scopes."""

from __future__ import annotations

import pytest
from checks import check_numbers, trained
from matrix import Cell, accepted


@pytest.mark.parametrize(
    ("cell", "ranks"),
    [pytest.param(cell, ranks, id=f"{cell.id}-{ranks}") for cell, ranks in accepted("parameters")],
)
def test_numbers(cell: Cell, ranks: int) -> None:
    check_numbers(cell.compose(), trained(cell, ranks))
