"""`hocket bench partial_allreduce` measures, and writes a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("where", [[], ["--virtual"]], ids=["mpi", "virtual"])
def test_the_benchmark(where: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hocket", "bench", "partial_allreduce", "--toy", *where]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=300)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {row["bytes"] for row in found["rows"]} == {64, 65536}
    latency = {row["side"]: row["mean_s"] for row in found["rows"] if row["bytes"] == 64}
    solo = min(seconds for side, seconds in latency.items() if side.startswith("solo"))
    assert solo < min(latency[baseline] for baseline in found["baselines"])
    assert "| 65536 | majority, " in (tmp_path / "table.md").read_text()


def test_somebodys_figures_stay(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("somebody's")
    command = [sys.executable, "-m", "hocket", "bench", "partial_allreduce", "--toy", "--virtual"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 2
    assert f"{tmp_path} holds table.md, which Hocket did not write" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]
