"""What users of other launchers and trainers type and expect."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.shell_completion import BashComplete, ZshComplete
from click.testing import CliRunner, Result
from torch import nn

import hocket
from hocket.cli.listing import plugins_command
from hocket.cli.main import cli, main
from hocket.errors import UserError
from hocket.training.observer import Display, observer_for
from hocket.training.run import load_run, resolved


def invoke(*args: str) -> Result:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"], ["-np", "3"], ["--np", "3"], ["--np=3"]])
def test_the_number_of_ranks_as_other_launchers_write_it(words: list[str]) -> None:
    assert "sgd: Synchronous SGD" in (shown := invoke("plan", "sgd", *words).output)
    assert "\n3 ranks; task digits" in shown


def test_help_of_bench_is_help() -> None:
    assert invoke("bench", "--help").output.startswith("Usage: cli bench [NAME] [ARGUMENT]...")


def test_public_names_are_shown() -> None:
    code = "import hocket, sys; print(dir(hocket) == sorted(hocket.__all__), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "True False\n"
    for name in dir(hocket):
        assert getattr(hocket, name) is not None


def test_only_the_main_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> tuple[bool, int]:
        model = nn.Linear(2, 2)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            session.print("rank", session.rank, "of", session.size, sep="-")
            return session.is_main, session.local_rank

    assert hocket.virtual(3).run(train) == [(True, 0), (False, 1), (False, 2)]
    assert capsys.readouterr().out == "rank-0-of-3\n"


def test_a_printed_configuration_is_the_runs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = invoke("run", "dpsgd", "-n", "4", "epochs=2", "parameters.0.every=3", "--print-config").output
    (tmp_path / "mine.yaml").write_text(printed)
    assert invoke("run", "mine.yaml", "--print-config").output == printed
    asked = resolved(load_run("dpsgd", ["epochs=2", "parameters.0.every=3"]))
    assert resolved(load_run("mine.yaml")) == {**asked, "ranks": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_dry_run_says_what_would_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sgd", "-n", "3", "--transport", "virtual", "accumulate=2", "epochs=5"]
    told, length = invoke("run", *words, "--dry-run").output.splitlines()
    assert told.startswith(
        "would start sgd: task digits, 3 ranks over virtual, on cpu, 1 thread each, results in runs"
    )
    assert length.startswith("1,442 samples to train on: 40 steps of 192 samples, 8 in an epoch; ")
    assert not list(tmp_path.iterdir())
    invoke("run", *words, "epochs=1", "--out", "out", "-q")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 8


def test_a_phase_that_is_never_reached_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "phases.yaml"
    file.write_text("recipe: sgd\nphases: {8: {gradients: [], parameters: [{collective: allreduce}]}}\n")
    words = [
        "run",
        str(file),
        "-n",
        "2",
        "--transport",
        "virtual",
        "--overwrite",
        "--out",
        str(tmp_path / "out"),
    ]
    warning = (
        "phases.8 is never reached: training ends after step 8. Begin it earlier, or raise steps or epochs"
    )
    for steps, told in ((8, [warning]), (9, [])):
        for more in (["--dry-run"], []):
            caplog.clear()
            invoke(*words, f"steps={steps}", *more)
            assert caplog.messages == told


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (
            29,
            "parameters.0 never takes place: it is due every 30 steps, but training ends after step 29. Lower `every`, "
            "or raise",
        ),
        (
            59,
            "outer parameters every 30 steps: the evaluated and saved model lacks the last 29 of 59 steps",
        ),
        (60, ""),
    ],
)
def test_steps_that_no_exchange_follows_are_told_once(
    steps: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "outer.yaml"
    file.write_text("parameters: [{collective: allreduce, every: 30, outer: {name: sgd, lr: 0.7}}]\n")
    words = ["run", str(file), "-n", "2", "--transport", "virtual", "--out", str(tmp_path / "out")]
    for more in (["--dry-run"], []):
        caplog.clear()
        invoke(*words, f"steps={steps}", *more)
        assert len(caplog.messages) == bool(told)
        assert told in caplog.text


def test_a_run_that_diverges_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["run", "local", "-n", "2", "--transport", "virtual", "log_every=4", "epochs=1"]
    invoke(*words, "optimizer.lr=1e30", "--out", str(tmp_path / "out"))
    assert caplog.messages == [
        "the training loss is nan, seen at step 4: lower optimizer.lr, or clip gradients (clip_grad_norm=1.0)"
    ]
    caplog.clear()
    invoke(*words, "--out", str(tmp_path / "fine"))
    assert not caplog.messages


def test_a_dry_run_that_refuses_says_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hocket", "run", "sgd", "optimizer.lrr=1", "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "optimizer.lrr: unknown argument of sgd" in shown.err


def test_more_is_shown_and_less(tmp_path: Path) -> None:
    words = ["run", "sgd", "-n", "2", "--transport", "virtual", "steps=12", "log_every=4"]
    assert invoke(*words, "-q", "--out", str(tmp_path / "quiet")).output == ""
    shown = invoke(*words, "-v", "--out", str(tmp_path / "more")).output
    config = (tmp_path / "more" / "config.yaml").read_text().removesuffix("...\n")
    assert f"\n{config}\n" in shown
    rows = [json.loads(line) for line in (tmp_path / "more" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in shown.splitlines() if line.startswith("epoch ")]
    assert len(lines) == len(rows) == 3
    for line, row, before in zip(lines, rows, [{"step": 0, "seconds": 0.0}, *rows], strict=False):
        speed = (row["step"] - before["step"]) / (row["seconds"] - before["seconds"])
        sent = row["bytes_sent"] / row["step"] / 1e3
        assert line.endswith(
            f"  {speed:.3g} steps/s, {sent:,.4g} kB/step sent, {100 * row['wait_share']:.0f} % waited"
        )
    mistaken = CliRunner().invoke(cli, [*words, "-q", "-v"])
    assert isinstance(mistaken.exception, UserError)


def test_a_bar_has_speed_and_time_left_and_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    bar = observer_for(Display.BAR, 10_000, 100_000)
    assert bar is not None
    for step in (10_050, 10_100, 10_150):
        bar.step(step)
        time.sleep(0.02)
    bar.row({"epoch": 1, "step": 10_150, "train_loss": 1.25, "seconds": 3.0})
    bar.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).replace("\r", "\n").split("\n")[-2]
    found = re.search(r" 10150/100000 ([\d.e+]+) steps/s (\d+:\d\d:\d\d) loss 1.2500$", last.rstrip())
    assert found is not None, last
    # 50 steps in 20 ms or more: what a resumed run had done before is no speed of this one.
    assert 0 < float(found[1]) <= 2500
    assert len(last) <= 80


def test_a_window_of_steps_is_traced(tmp_path: Path) -> None:
    words = ["run", "sgd", "-n", "2", "--transport", "virtual", "steps=6", "-q", "--out", str(tmp_path)]
    invoke(*words, "--trace-steps", "2:4")
    assert not (tmp_path / "trace-recordings").exists()
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = [(event["pid"], event["name"]) for event in events if event.get("cat") == "step"]
    assert sorted(steps) == [(1, "step 2"), (1, "step 3"), (2, "step 2"), (2, "step 3")]
    assert load_run(str(tmp_path / "config.yaml")).trace_window == (2, 4)
    for mistaken in ("2", "4:4", "a:b", ":"):
        refused = CliRunner().invoke(cli, [*words, "--trace-steps", mistaken])
        assert isinstance(refused.exception, UserError)
        assert str(refused.exception).startswith(
            f"--trace-steps {mistaken}: give the first step, counted from 0"
        )


@pytest.mark.parametrize("words", [["run"], ["plan", "sgd"], ["sweep"]])
def test_recipes_are_completed(words: list[str]) -> None:
    def completed(incomplete: str) -> list[tuple[str, str]]:
        found = ZshComplete(cli, {}, "hocket", "_HOCKET_COMPLETE").get_completions(words, incomplete)
        return [(item.type, item.value) for item in found]

    assert completed("sg") == [("plain", "sgd"), ("plain", "sgp")]
    assert completed("my_") == [("file", "my_")]


def test_tasks_are_completed() -> None:
    zsh, bash = (kind(cli, {}, "hocket", "_HOCKET_COMPLETE") for kind in (ZshComplete, BashComplete))
    assert [item.value for item in zsh.get_completions(["run", "sgd"], "task=di")] == ["task=digits"]
    assert [item.value for item in bash.get_completions(["run", "sgd", "task", "="], "di")] == ["digits"]
    assert zsh.get_completions(["run", "sgd"], "epochs=") == []


def test_plugins_are_listed_within_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins_command()
    words = capsys.readouterr().out.split()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    plugins_command()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == words
    [start] = {line.index("Synchronous SGD") for line in shown.splitlines() if " agd " in line}
    after = shown.splitlines()[next(i for i, line in enumerate(shown.splitlines()) if " agd " in line) + 1]
    assert len(after) - len(after.lstrip()) == start
