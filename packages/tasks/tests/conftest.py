"""Fixtures of all tests of the package: commands run in their process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from hocket.cli.main import main


@pytest.fixture
def hocket_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that carries out a command, and fails where that does."""

    def command(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["hocket", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code

    return command
