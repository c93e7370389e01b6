"""Fixtures of all tests of the package: modules beside them are found, and commands run in their process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.cli.main import main

# With --import-mode=importlib the modules beside the tests are not found by themselves.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def hocket_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that carries out a command, and fails where that does."""

    def command(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["hocket", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code

    return command
