"""The predictions of `hocket recommend` for DiLoCo in a file: its own phases count, whatever the file is based on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import hocket_diloco
from hocket.cli.main import cli

ATLAS = Path(__file__).resolve().parents[3] / "docs" / "atlas" / "README.md"
SITUATION = ["--params", "1M", "--hosts", "4x1", "--bandwidth", "100mbit", "--step", "200ms"]
OUTER = "{name: sgd, lr: 0.7, momentum: 0.9, nesterov: true}"
FILE = """
recipe: agd
optimizer: {name: adamw, lr: 0.001, weight_decay: 0.1}
phases:
  240:
    gradients: []
    parameters:
      - {collective: allreduce, segments: bytes, every: %d, outer: %s}
"""


def recommend(*arguments: str) -> list[str]:
    result = CliRunner().invoke(cli, ["recommend", *arguments, *SITUATION], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(f"{name}  "))


def words(lines: list[str], name: str) -> str:
    """Return what the list below the table says of a strategy."""
    start = next(place for place, line in enumerate(lines) if line.startswith(f"  - {name}: "))
    end = next(place for place in range(start + 1, len(lines)) if not lines[place].startswith("    "))
    return " ".join(line.strip() for line in lines[start:end])


def seconds(cell: str, unit: str) -> float:
    return float(cell) * {"s": 1.0, "ms": 1e-3}[unit]


@pytest.mark.parametrize(("every", "measured"), [(30, True), (40, False)])
def test_a_phase_costs_what_its_own_parts_cost(tmp_path: Path, every: int, measured: bool) -> None:
    (tmp_path / "mine.yaml").write_text(FILE % (every, OUTER))
    lines = recommend(str(tmp_path / "mine.yaml"))
    name = "mine.yaml, from step 240 on"
    told = words(lines, name)
    assert "the same mean" not in told
    assert row(lines, name).endswith("not measured") is not measured
    assert ("every 30 steps" in told) is measured


def test_a_setting_that_was_measured_is_no_unknown() -> None:
    lines = recommend("diloco", "parameters.0.every=30")
    assert row(lines, "diloco, every=30").split()[-1] == row(lines, "diloco").split()[-1] != "measured"
    assert row(recommend("diloco", "parameters.0.every=40"), "diloco, every=40").endswith("not measured")


def test_the_average_is_of_the_file_s_own_phases(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FILE % (40, OUTER))
    name = "mine.yaml, from step 240 on"
    lines = recommend(str(tmp_path / "mine.yaml"), "steps=960")
    cells = row(lines, name)[len(name) :].split()
    step_s, average_s = seconds(cells[0], cells[1]), seconds(cells[2], cells[3])
    plain = row(lines, "agd")[len("agd") :].split()
    assert average_s == pytest.approx(0.25 * seconds(plain[0], plain[1]) + 0.75 * step_s, rel=0.01)
    # A run that ends before the phase has nothing of it.
    lines = recommend(str(tmp_path / "mine.yaml"), "steps=100")
    assert not any("from step 240" in line for line in lines)


@pytest.mark.parametrize("name", ["diloco", "streaming", "noloco", "sparta", "muloco", "sparseloco"])
def test_accuracy_from_scratch_is_the_atlas_s(name: str) -> None:
    of_characters = ATLAS.read_text().split("\n## ")[1]
    assert of_characters.startswith("characters")
    losses = {
        found[1]: float(found[2]) for found in re.finditer(r"^\| `(\S+)` \| (\d\.\d+) ", of_characters, re.M)
    }
    file = Path(str(hocket_diloco.__file__)).parent / "recipes" / f"{name}.yaml"
    start, scratch = yaml.safe_load(file.read_text())["accuracy"].split("; from scratch")
    loss = losses["diloco" if name == "diloco" else f"diloco.{name}"]
    assert f"{100 * (loss / losses['sgd'] - 1):.1f} % above" in scratch
    assert "after a synchronous start" in start
