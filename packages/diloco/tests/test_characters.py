"""The table of the comparison: what it computes from runs' summaries, and that its rows are runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hocket.training.run import load_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import characters


def test_differences_are_paired_and_bounds_are_met_where_the_interval_reaches_them(tmp_path: Path) -> None:
    told = {
        "base": [2.0, 2.2, 2.4],
        "near": [2.02, 2.25, 2.47],
        "far": [2.4, 2.6, 2.9],
    }
    rows = {
        "base": characters.Row("base", "sgd"),
        "near": characters.Row("near", "diloco", against="base", within=2.0),
        "far": characters.Row("far", "diloco", against="base", within=2.0),
        "worse": characters.Row("worse", of="far", against="base", worse=True),
        "not worse": characters.Row("not worse", of="base", against="near", worse=True),
        "first rank": characters.Row("first rank", of="near", loss="of_ranks", against="near"),
        "not yet": characters.Row("not yet", "diloco", against="base"),
    }
    for name, losses in told.items():
        for seed, loss in enumerate(losses):
            folder = characters.run_of(rows[name], seed, tmp_path).folder
            folder.mkdir()
            summary = {
                "valid_loss": loss,
                "of_ranks": [loss + seed, 9],
                "bytes_sent_per_step": 5e5,
                "steps": 4,
            }
            (folder / "summary.json").write_text(json.dumps(summary))
    head, _, *lines = characters.table(rows, range(3), tmp_path).splitlines()
    cells = {each[1]: each[2:-1] for each in ([cell.strip() for cell in line.split("|")] for line in lines)}
    assert head.split("|")[1:4] == [" row ", " seeds ", " loss "]
    assert cells["base"] == ["3", "2.2000", "2.0 MB", "", "", "", ""]
    paired = 100 * (np.divide(told["near"], told["base"]) - 1)
    half = 4.302653 * paired.std(ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
    expected = f"{paired.mean():+.2f} % ({paired.mean() - half:+.2f} to {paired.mean() + half:+.2f})"
    assert cells["near"][3:] == ["base", expected, "within 2 %", "yes"]
    assert cells["far"][5:] == ["within 2 %", "no"]
    assert cells["worse"][5:] == ["worse", "yes"]
    assert cells["not worse"][5:] == ["worse", "no"]
    assert cells["first rank"][1] == f"{np.mean(np.add(told['near'], [0, 1, 2])):.4f}"
    assert "not yet" not in cells


@pytest.mark.parametrize(
    "name", [name for name, row in characters.read_rows(characters.TABLE).items() if not row.of]
)
def test_a_row_is_a_run_of_as_many_tokens(name: str) -> None:
    rows = characters.read_rows(characters.TABLE)
    row = rows[name]
    assert not row.against or row.against in rows
    run = load_run(characters.configured(row))
    asked = load_run(row.recipe, [each for each in row.set if each.startswith(("gradients", "parameters"))])
    first = load_run("agd") if row.synchronous else asked
    assert run.strategy.at(0).exchanges == first.strategy.exchanges
    assert run.strategy.at(240).exchanges == asked.strategy.exchanges
    assert run.ranks is not None
    assert run.steps is not None
    assert run.ranks * run.batch_size * run.accumulate * run.steps == 4 * 4 * 900
