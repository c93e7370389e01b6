"""What sharded models take for granted of torch, for `tools/versions` to try with other versions of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_islands
from islands.promises import PROMISES

started = test_islands.started  # a fixture


@pytest.fixture(scope="module")
def tried(started: test_islands.Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Try all promises on two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("promises")
    started(folder, "promises", 2)
    return folder


@pytest.mark.parametrize("name", PROMISES)
def test_torch_keeps(name: str, tried: Path) -> None:
    for rank in range(2):
        broken = (tried / f"{name} {rank}.txt").read_text()
        assert not broken, broken
