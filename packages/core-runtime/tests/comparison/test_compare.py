"""`hocket compare`: its numbers are those of the runs' files, nothing is cut, and mistakes are one line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

#: Carries out a command: its status and what it printed.
Hocket = Callable[..., Any]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summaries(runs: Path, recipe: str) -> list[dict[str, Any]]:
    return [json.loads((runs / f"{recipe}-{seed}" / "summary.json").read_text()) for seed in range(3)]


def table(text: str) -> dict[str, dict[str, str]]:
    """Return cells by run and column, of tables below each other, with a row or a column for each run."""
    cells: dict[str, dict[str, str]] = {}
    for part in text.partition("\n\ndifferences from ")[0].split("\n\n"):
        lines = [re.split(r" {2,}", line.strip()) for line in part.splitlines() if "  " in line]
        if "steps/s" in [first for first, *_ in lines]:
            lines = [list(column) for column in zip(*lines, strict=True)]
        (_, *columns), *rows = lines
        for name, *values in rows:
            cells.setdefault(name, {}).update(zip(columns, values, strict=True))
    return cells


def test_means_and_spreads_over_seeds(runs: Path, hocket: Hocket) -> None:
    ended = hocket("compare", str(runs), "--metric", "accuracy", "--metric", "overlap_share")
    assert ended.status == 0
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    cells = table(ended.out)
    assert list(cells) == ["dpsgd (3 seeds)", "sgd (3 seeds)"]
    for recipe in ("sgd", "dpsgd"):
        found, of_recipe = summaries(runs, recipe), cells[f"{recipe} (3 seeds)"]
        for column, key, scale in (
            ("valid_accuracy", "valid_accuracy", 1),
            ("waited", "exposed_wait_fraction", 100),
            ("bytes/step", "bytes_sent_per_step", 1e-3),
            ("distance", "consensus_distance", 1),
        ):
            values = [scale * each[key] for each in found]
            mean, deviation = (float(part.split()[0]) for part in of_recipe[column].split("±"))
            assert mean == pytest.approx(fmean(values), rel=2e-3), column
            assert deviation == pytest.approx(stdev(values), rel=2e-2, abs=1e-2 * mean), column
    assert "valid_loss" not in cells["sgd (3 seeds)"]


def test_a_target_is_reached_in_the_first_row_that_has_it(runs: Path, hocket: Hocket) -> None:
    rows = [row for row in rows_of(runs / "sgd-0") if "valid_loss" in row]
    middle = rows[1]
    for name, relation in (("loss", "="), ("valid_loss", "<="), ("accuracy", "="), ("valid_accuracy", ">=")):
        full = name if name.startswith("valid") else f"valid_{name}"
        ended = hocket("compare", str(runs / "sgd-0"), "--target", f"{name}{relation}{middle[full]}")
        cells = table(ended.out.split("\n", 1)[1])["sgd-0"]
        assert ended.out.startswith(f"target: {full} of ")
        assert float(cells["time to target"].split()[0]) == pytest.approx(1e3 * middle["seconds"], rel=1e-3)
        assert float(cells["bytes to target"].split()[0]) == pytest.approx(
            1e-6 * middle["bytes_sent"], rel=1e-3
        )


def test_several_targets(runs: Path, hocket: Hocket) -> None:
    rows = [row for row in rows_of(runs / "sgd-0") if "valid_loss" in row]
    asked = [f"loss<={rows[0]['valid_loss']}", f"accuracy>={rows[1]['valid_accuracy']}"]
    words = [word for target in asked for word in ("--target", target)]
    ended = hocket("compare", str(runs / "sgd-0"), *words)
    assert ended.status == 0, ended.err
    first, second, text = ended.out.split("\n", 2)
    assert first.startswith("target 1: valid_loss of ")
    assert second.startswith("target 2: valid_accuracy of ")
    cells = table(text)["sgd-0"]
    for place, row in ((1, rows[0]), (2, rows[1])):
        seconds = float(cells[f"time to target {place}"].split()[0])
        sent, unit = cells[f"bytes to target {place}"].split()
        assert seconds == pytest.approx(1e3 * row["seconds"], rel=1e-3)
        assert float(sent) * {"kB": 1e3, "MB": 1e6}[unit] == pytest.approx(row["bytes_sent"], rel=1e-3)


def test_of_a_target_that_is_never_reached_the_best_value_is_told(runs: Path, hocket: Hocket) -> None:
    for name, best, target in (("valid_accuracy", max, 2), ("valid_loss", min, -1)):
        found = [row[name] for seed in range(3) for row in rows_of(runs / f"sgd-{seed}") if name in row]
        cells = table(hocket("compare", str(runs), "--target", f"{name}={target}").out.split("\n", 1)[1])
        of_sgd = cells["sgd (3 seeds)"]
        assert of_sgd["time to target"] == f"never (best {best(found):.4g})"
        assert of_sgd["bytes to target"] == "never"
    ends = [rows_of(runs / f"sgd-{seed}")[-1]["valid_accuracy"] for seed in range(3)]
    some = hocket("compare", str(runs), "--target", f"accuracy>={max(ends)}").out.split("\n", 1)[1]
    assert table(some)["sgd (3 seeds)"]["time to target"].endswith("(1 of 3)")


def test_a_seed_that_counts_twice_is_said(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    for name in ("sgd-0", "sgd-1"):
        shutil.copytree(runs / name, tmp_path / name)
    shutil.copytree(runs / "sgd-0", tmp_path / "run")
    ended = hocket("compare", str(tmp_path))
    assert "sgd (3 runs of 2 seeds)" in ended.out
    assert ended.err == (
        "hocket: sgd (3 runs of 2 seeds): some runs have the same settings and seed: run, sgd-0 (seed 0). "
        "This makes the deviation after ± too small: compare one run for each seed\n"
    )
    assert "1 seed)" in hocket("compare", str(tmp_path / "run"), str(tmp_path / "sgd-0")).out


def test_long_names_are_folded(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    name = "a_run_whose_name_" + "goes_on_and_" * 8
    for each in ("one", "two"):
        shutil.copytree(runs / f"{'sgd' if each == 'one' else 'dpsgd'}-0", tmp_path / (name + each))
    ended = hocket("compare", *map(str, tmp_path.iterdir()))
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert (name + "one").replace("_", "") in "".join(
        line.split("  ")[0].replace("_", "") for line in ended.out.splitlines()
    )


def test_on_a_terminal(runs: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.environ.pop("COLUMNS", None)
        os.execv(
            sys.executable, [sys.executable, "-m", "hocket", "compare", str(runs), "--target", "accuracy=0.8"]
        )
    shown = b""
    with contextlib.suppress(OSError):  # a terminal's end
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert "…" not in "".join(lines)
    for column in ("valid_accuracy", "time to target", "bytes/step", "waited", "distance"):
        assert any(column in line for line in lines)
    named = [line for line in lines if "dpsgd (3 seeds)" in line]
    assert len(named) == 1 + 1  # the table, with a column for each run, and the differences' meaning
    assert "sgd (3 seeds)" in named[0].replace("dpsgd", "")


def test_an_interrupted_run_is_told_apart(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    for seed in range(3):
        shutil.copytree(runs / f"sgd-{seed}", tmp_path / str(seed))
    (tmp_path / "1" / "summary.json").unlink()
    metrics = tmp_path / "1" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2])[:-5])  # a part of a line
    ended = hocket("compare", *(str(tmp_path / str(seed)) for seed in range(3)))
    step = rows_of(runs / "sgd-1")[0]["step"]
    assert ended.err.startswith(
        f"hocket: {tmp_path / '1'} has not ended: its numbers go up to step {step}; if"
    )
    assert ended.err.endswith("begin it anew\n")
    assert list(table(ended.out)) == ["sgd (2 seeds)", f"1 (until step {step})"]


@pytest.mark.parametrize(
    "left", [["config.yaml", "metrics.jsonl"], ["run.yaml", "output.txt"], ["config.next.yaml"]]
)
def test_a_run_that_ended_before_its_first_metrics_is_left_out(
    left: list[str], runs: Path, hocket: Hocket, tmp_path: Path
) -> None:
    for seed in range(2):
        shutil.copytree(runs / f"sgd-{seed}", tmp_path / f"sgd-{seed}")
    cut = tmp_path / "sgd-2"
    cut.mkdir()
    for name in left:
        config = (runs / "sgd-2" / "config.yaml").read_text()
        (cut / name).write_text(config if name.endswith(".yaml") else "")
    for words in ([tmp_path], sorted(tmp_path.iterdir())):
        ended = hocket("compare", *map(str, words))
        assert ended.status == 0
        assert ended.err == (
            f"hocket: {cut} is left out: it has no metrics yet; if it was interrupted, begin it anew\n"
        )
        assert list(table(ended.out)) == ["sgd (2 seeds)"]
        assert "mean ± standard deviation (n - 1) over runs that differ by their seeds only" in ended.out
    alone = hocket("compare", str(cut))
    assert (alone.status, len(alone.err.splitlines())) == (2, 1)
    assert "interrupted before its first line" in alone.err


def test_a_run_that_diverged_is_seen(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    for seed, value in ((0, "NaN"), (1, "Infinity"), (2, None)):
        shutil.copytree(runs / f"sgd-{seed}", tmp_path / f"sgd-{seed}")
        for file in ("metrics.jsonl", "summary.json"):
            path = tmp_path / f"sgd-{seed}" / file
            if value is not None:
                path.write_text(re.sub(r'"valid_loss": [^,]*', f'"valid_loss": {value}', path.read_text()))
    ended = hocket("compare", str(tmp_path), "--out", str(tmp_path / "page"))
    assert ended.status == 0, ended.err
    assert table(ended.out)["sgd (3 seeds)"]["valid_loss"].startswith("nan")
    alone = hocket("compare", str(tmp_path / "sgd-1"))
    assert table(alone.out)["sgd-1"]["valid_loss"] == "inf"


def test_different_tasks_and_clocks_are_said(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    shutil.copytree(runs / "sgd-0", tmp_path / "other")
    config = tmp_path / "other" / "config.yaml"
    config.write_text(config.read_text().replace("hidden: 128", "hidden: 64"))
    summary = tmp_path / "other" / "summary.json"
    summary.write_text(summary.read_text().replace('"virtual"', '"mpi"'))
    ended = hocket("compare", str(runs / "sgd-0"), str(tmp_path / "other"))
    assert ended.status == 0
    tasks, clocks = ended.err.splitlines()
    assert "the runs have different tasks, so their metrics cannot be compared" in tasks
    assert "hidden=128" in tasks
    assert "hidden=64" in tasks
    assert "seconds on the virtual clock cannot be compared" in clocks


def test_the_transport_that_was_used_counts(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    for seed, chosen in ((0, "transport: mpi"), (1, "transport: null")):
        folder = tmp_path / f"mpi-{seed}"
        shutil.copytree(runs / f"sgd-{seed}", folder)
        for file, was, becomes in (
            ("config.yaml", "transport: virtual", chosen),
            ("summary.json", '"transport": "virtual"', '"transport": "mpi"'),
        ):
            text = (folder / file).read_text()
            assert was in text
            (folder / file).write_text(text.replace(was, becomes))
    ended = hocket("compare", str(tmp_path), str(runs / "sgd-2"))
    assert ended.status == 0, ended.err
    [line] = [line for line in ended.out.splitlines() if line.startswith("runs differ in transport: ")]
    assert "null" not in ended.out
    assert line.startswith("runs differ in transport: mpi in ")
    assert "(2 seeds)" in line


def test_differences_are_below_the_table(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    ended = hocket("compare", str(runs), "--metric", "loss")
    assert ended.status == 0, ended.err
    text = ended.out.partition("\ndifferences from ")[2]
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert text.startswith("dpsgd (3 seeds), seed by seed: mean ± 95 %")
    assert re.search(r"^run +sgd \(3 seeds\)\nseeds +3$", text, re.MULTILINE)
    for recipe in ("sgd", "dpsgd"):
        shutil.copytree(runs / f"{recipe}-0", tmp_path / recipe)
    assert "differences from" not in hocket("compare", str(tmp_path)).out


def test_a_run_that_holds_runs_says_which_are_taken(runs: Path, hocket: Hocket, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    shutil.copytree(runs / "sgd-0", folder)
    for recipe in ("sgd", "dpsgd"):
        shutil.copytree(runs / f"{recipe}-1", folder / recipe)
    ended = hocket("compare", str(folder))
    assert list(table(ended.out)) == ["sweep"]
    assert ended.err == (
        f"hocket: {folder} is a run, and is compared. It also holds 2 other runs, which are not compared (dpsgd, "
        f"sgd): to compare them, name them, as in {folder}/*/\n"
    )
    assert hocket("compare", str(folder), *map(str, (folder / "sgd", folder / "dpsgd"))).err == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent"], "absent holds no run: there is no such folder"),
        (["empty"], "empty holds no run: it has no config.yaml"),
        (["file"], "file holds no run: it is a file"),
        (["RUN", "RUN"], "is named 2 times"),
        (["RUN", "--metric", "valid_acuracy"], "has no metric 'valid_acuracy'. Did you mean 'valid_accuracy'?"),
        (["RUN", "--metric", "valid_acuracy"], "Did you mean 'valid_accuracy'?"),
        (["RUN", "--target", "accuracy"], "--target 'accuracy': not of the form NAME=VALUE"),
        (["RUN", "--target", "accuracy=high"], "--target 'accuracy=high': not of the form NAME=VALUE"),
        (["RUN", "--target", "f1=0.5"], "has no metric 'f1'"),
        (["RUN", "--target", "staleness_max=0.5"], "is known only at the end of a run"),
        (["RUN", "--out", "file/within"], "--out file/within cannot be written: Not a directory"),
        (["broken"], "broken/metrics.jsonl cannot be read: "),
        (["short"], "short: the run has ended after "),
        (["without"], "without: the run has ended, but its metrics.jsonl is missing: put the file back, or delete "),
    ],
)  # fmt: skip
def test_mistakes(
    arguments: list[str],
    expected: str,
    runs: Path,
    hocket: Hocket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").touch()
    shutil.copytree(runs / "sgd-0", "broken")
    Path("broken/metrics.jsonl").write_text("{\n")
    for name in ("short", "without"):
        shutil.copytree(runs / "sgd-0", name)
    first, *_ = Path("short/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("short/metrics.jsonl").write_text(first)
    Path("without/metrics.jsonl").unlink()
    places = {"RUN": str(runs / "sgd-0")}
    ended = hocket("compare", *(places.get(argument, argument) for argument in arguments))
    assert ended.status == 2
    [line] = ended.err.splitlines()
    assert expected in line
