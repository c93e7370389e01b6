"""A setting of every test here."""

from __future__ import annotations

import pytest

from hocket.checkpoint import shared


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there will not come."""
    monkeypatch.setattr(shared, "LATE_S", 0.2)
