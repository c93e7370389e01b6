"""A script's run: the folder that attach(..., out=...) writes, and what commands make of it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.cli.folders import load_resumed
from hocket.cli.recommending import recommend_command
from hocket.cli.sweep_run import OUTPUT
from hocket.cli.sweeping import _compare
from hocket.cli.sweeping_scripts import _RunOfScript
from hocket.cli.wanted_ranks import WantedRanks
from hocket.comparison.record import read_record
from hocket.errors import AttachError, UserError
from hocket.results.history import read_rows
from hocket.results.script import OUT, STRATEGY
from hocket.session import script_run

RANKS = 2


def train(out: Path | None, steps: int, *, load: Path | None = None, crash: bool = False) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hocket.attach(model, optimizer, "agd", out=out) as session:
        if load is not None:
            session.load(load, missing="start")
        while session.step < steps:
            optimizer.zero_grad()
            model(torch.ones(3, 4) * (session.rank + 1)).square().mean().backward()
            optimizer.step()
            session.log({"train_loss": 1.0 / session.step})
        if load is not None and not crash:
            session.save(load)
        if crash:
            raise RuntimeError("power cut")


def run(*arguments: Any, **named: Any) -> None:
    hocket.virtual(RANKS).run(lambda: train(*arguments, **named))


def rows(folder: Path) -> list[Any]:
    return list(read_rows(folder / "metrics.jsonl"))


def test_the_folder_of_a_script_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a"
    run(out, 3)
    record = read_record(out, "a")
    assert [(row["step"], row["train_loss"]) for row in record.rows] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert record.summary is not None
    assert (record.summary["steps"], record.summary["recipe"], record.ranks) == (3, "agd", RANKS)
    assert record.summary["parameters"] == 10
    assert record.summary["train_loss"] == 1 / 3
    # An allreduce of 10 float32 values and a trailer among two ranks: each sends half of them twice.
    assert record.summary["bytes_sent_per_step"] == pytest.approx(rows(out)[-1]["bytes_sent"] / 3)
    assert record.config["optimizer"] | {"lr": 0.1, "name": "sgd"} == record.config["optimizer"]
    assert record.config["seed"] == 3
    assert hocket.compose({"strategy": record.config["strategy"]}) == hocket.compose("agd")
    assert json.loads((out / "run.json").read_text())[0]["hosts"]
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Hocket: agd on 2 ranks over virtual, 10 parameters: in each step, ")
    assert last.startswith("Hocket: 3 steps in ")


def test_a_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    out, saved = tmp_path / "a", tmp_path / "checkpoints"
    run(None, 2, load=saved)  # saves after step 2
    with pytest.raises(RuntimeError, match="power cut"):
        run(out, 4, load=saved, crash=True)  # rows 3 and 4, and no checkpoint of them
    assert not (out / "summary.json").exists()
    run(out, 5, load=saved)
    assert [row["step"] for row in rows(out)] == [3, 4, 5]
    assert len(json.loads((out / "run.json").read_text())) == 2


def test_hocket_resume_says_that_a_script_s_command_is_repeated(tmp_path: Path) -> None:
    run(tmp_path / "a", 2)
    with pytest.raises(UserError, match="is the run of a script: repeat the command that started it"):
        load_resumed(tmp_path / "a", [])


def test_seconds_go_on_with_the_rows_that_are_kept(tmp_path: Path) -> None:
    out, saved = tmp_path / "a", tmp_path / "checkpoints"
    run(out, 2, load=saved)  # rows 1 and 2, and a checkpoint after step 2
    (out / "summary.json").unlink()  # as if it had been cut off then
    first = rows(out)
    run(out, 5, load=saved)
    again = rows(out)
    assert again[:2] == first
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5]
    for name in ("seconds", "bytes_sent", "exposed_wait_s"):
        assert [row[name] for row in again] == sorted(row[name] for row in again)
    summary = read_record(out, "a").summary
    assert summary is not None
    assert summary["seconds"] >= again[-1]["seconds"] > first[-1]["seconds"]
    assert summary["steps_per_second"] == pytest.approx(5 / summary["seconds"])


def test_steps_before_a_folder_has_rows_are_in_no_time(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    run(tmp_path / "whole", 5)
    whole = read_record(tmp_path / "whole", "whole").summary
    assert whole is not None
    per_step = whole["bytes_sent_per_step"]
    run(None, 2, load=saved)
    run(tmp_path / "a", 5, load=saved)
    summary = read_record(tmp_path / "a", "a").summary
    assert summary is not None
    assert summary["steps_per_second"] == pytest.approx(3 / summary["seconds"])
    assert summary["bytes_sent_per_step"] == per_step
    assert 0 <= summary["exposed_wait_fraction"] <= 1


def test_a_run_that_begins_anew_replaces_one_that_was_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "a"
    with pytest.raises(RuntimeError, match="power cut"):
        run(out, 4, crash=True)
    run(out, 1)
    assert [row["step"] for row in rows(out)] == [1]


def test_a_run_that_has_ended_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "a"
    run(out, 1)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(
        AttachError, match=r"out .*a holds the results of a run that has ended: name another folder"
    ):
        run(out, 2)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "run.json"])
def test_the_files_of_others_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(hocket.errors.HocketError, match=f"holds {name}, which Hocket did not write"):
        run(tmp_path, 1)
    assert (tmp_path / name).read_text() == "mine"


def test_a_script_that_logs_nothing_has_a_row(tmp_path: Path) -> None:
    out = tmp_path / "a"

    def alone() -> None:
        model = nn.Linear(2, 1)
        with hocket.attach(model, torch.optim.AdamW(model.parameters()), "local", out=out):
            pass

    alone()
    assert [row["step"] for row in rows(out)] == [0]
    assert read_record(out, "a").config["optimizer"]["name"] == "adamw"


def test_a_sweep_changes_the_strategy_of_the_first_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import itertools

    monkeypatch.setattr(script_run, "_sessions", itertools.count())
    monkeypatch.setenv(STRATEGY, json.dumps(["periodic_average", "parameters.0.every=3"]))
    monkeypatch.setenv(OUT, str(tmp_path / "a"))

    model = nn.Linear(2, 1)
    for expected in (hocket.compose("periodic_average", "parameters.0.every=3"), hocket.compose("agd")):
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "agd") as session:
            assert session.inner.strategy == expected
    assert read_record(tmp_path / "a", "a").summary is not None


SCRIPT = """
import argparse, hocket, torch
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--lr", type=float)
given = parser.parse_args()
torch.manual_seed(given.seed)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
with hocket.attach(model, optimizer, "agd") as session:
    for _ in range(2):
        optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    session.log({"valid_loss": float(model.weight.sum())})
"""


def test_a_sweep_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def sweep(seed: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hocket", "sweep", "--script", "train.py", "strategy=dpsgd,local"]
        command += [f"seed={seed}", "lr=0.5", "-n", "1", "--transport", "torch", "--out", "sw"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    swept = sweep(0)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "[2/2] local: validation loss " in swept.stdout
    config = read_record(tmp_path / "sw" / "dpsgd", "dpsgd").config
    assert config["task"] == {"name": "script", "program": "train.py", "lr": "0.5"}
    assert (config["seed"], config["name"]) == (0, "dpsgd")
    assert (tmp_path / "sw" / "dpsgd" / "source" / "train.py").read_text() == SCRIPT
    other = sweep(1)
    assert other.returncode == 2
    assert other.stderr == "hocket: sw/dpsgd holds a run with other seed: name another folder with --out\n"


def test_a_sweep_names_earlier_runs_and_a_script_s_own_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = _RunOfScript(tmp_path / "a", "train.py", {"lrate": "1"}, WantedRanks.of(2, None, None, ()))
    swept.folder.mkdir()
    refusal = "train.py: error: unrecognized arguments: --lrate 1"
    (swept.folder / OUTPUT).write_text(
        f"usage: train.py\n{refusal}\nhocket: the ranks ended with exit code 2\n"
    )
    assert swept.outcome(2).startswith(f"failed with exit status 2: {refusal} (")
    assert swept.outcome(1).startswith("failed with exit status 1: the ranks ended")
    (swept.folder / "config.yaml").touch()
    _compare([], tmp_path)
    assert "are left out of the table and the page: a; `hocket compare " in capsys.readouterr().out


def test_a_script_is_advised_by_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", 2)
    summary = read_record(tmp_path / "a", "a").summary
    assert summary is not None
    capsys.readouterr()
    advised = partial(
        recommend_command, [str(tmp_path / "a")], None, None, "2x1", everything=False, explain=False
    )
    advised(in_json=False)
    assert ", 24 parameters" in capsys.readouterr().out  # the least of 24 matrices, for the 10 of the run
    advised(in_json=True)
    computing_s = summary["seconds"] * (1 - summary["exposed_wait_fraction"]) / 2
    told = json.loads(capsys.readouterr().out)
    assert told["compute_s"] == pytest.approx(computing_s, rel=1e-5)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([{"loss": 3.0}, {"eval_loss": 2.0}, {"loss": 1.0}], ["eval_loss"]),
        ([{"val/acc": 0.5, "epoch": 1}, {"lr": 0.1}], ["val/acc"]),
        ([{"loss": 3.0, "epoch": 1}, {"tokens": 8, "text": "a"}], ["loss", "tokens"]),
        ([{"validity": 1.0, "tested": 2.0}], ["validity", "tested"]),
    ],
    ids=["eval", "val", "none held out", "other words"],
)
def test_the_metrics_of_scripts_have_any_name(
    tmp_path: Path, written: list[dict[str, Any]], shown: list[str]
) -> None:
    """Those on held-out samples are shown, or else all; the summary has the newest of each."""

    def write() -> None:
        model = nn.Linear(2, 1)
        with hocket.attach(
            model, torch.optim.SGD(model.parameters()), "local", out=tmp_path / "a"
        ) as session:
            for values in written:
                session.log(values)

    write()
    record = read_record(tmp_path / "a", "a")
    assert record.metrics == shown
    assert record.summary is not None
    newest = {name: value for values in written for name, value in values.items()}
    assert {name: record.summary[name] for name in newest} == newest
    assert record.resolve("loss" if "loss" in newest else shown[0]) in newest
