"""`hocket run --resume`: a run that was cut off ends with the files of one that was not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hocket.checkpoint.folder import complete
from hocket.cli.main import main
from hocket.session.replica_session import ReplicaSession

#: 23 steps make an epoch of two ranks.
ARGUMENTS = ("dpsgd", "-n", "2", "--transport", "virtual", "epochs=3", "checkpoint.every=7")
#: What depends on when a run was made.
TIMES = {"seconds", "steps_per_second", "exposed_wait_fraction", "overlap_share", "exposed_wait_s"}
TIMES |= {"wait_share", "wait_share_min", "wait_share_max", "exposed_wait_fraction_ranks"}


class Cut(BaseException):
    """The run is interrupted."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that carries out `hocket run` here, and returns its exit status."""

    def hocket_run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["hocket", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return hocket_run


@pytest.fixture(scope="module")
def made(hocket: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 7 steps that has ended, with a checkpoint."""
    folder = tmp_path_factory.mktemp("made") / "RUN"
    assert hocket("run", *ARGUMENTS, "steps=7", "--out", str(folder)).status == 0
    return folder


@pytest.fixture
def ended(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it in the present folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made, tmp_path / "RUN"))


@pytest.fixture
def cut_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes runs end as soon as they have ended a step."""

    def cut(step: int) -> None:
        report = ReplicaSession.end_batch

        def end_batch(session: ReplicaSession) -> None:
            report(session)
            if session.step == step:
                raise Cut

        monkeypatch.setattr(ReplicaSession, "end_batch", end_batch)

    return cut


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMES}


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, torch.Tensor]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return without_times(summary), [without_times(r) for r in rows], load_file(folder / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(one: Path, other: Path) -> bool:
    (summary, rows, model), (other_summary, other_rows, other_model) = results(one), results(other)
    return (summary, rows) == (other_summary, other_rows) and all(
        torch.equal(value, other_model[name]) for name, value in model.items()
    )


def test_a_run_that_saves_beside_training(made: Path, run: Callable[..., int], tmp_path: Path) -> None:
    out = tmp_path / "beside"
    assert run(*ARGUMENTS, "steps=7", "checkpoint.blocking=false", "--out", str(out)) == 0
    assert same(out, made)
    assert [path.name for path in complete(out / "checkpoints")] == ["step-00000007"]
    resumed, expected = tmp_path / "resumed", tmp_path / "expected"
    shutil.copytree(made, expected)
    out.rename(resumed)
    for folder in (resumed, expected):
        assert run(*ARGUMENTS, "steps=9", "--resume", "--out", str(folder)) == 0
    assert same(resumed, expected)


# Rows are written after step 50 and before: after the last checkpoint, within an epoch, and at its end.
@pytest.mark.parametrize("step", [*(pytest.param(each, marks=pytest.mark.full) for each in (13, 23, 60)), 51])
def test_a_run_that_was_cut_off(
    step: int, run: Callable[..., int], cut_after: Callable[[int], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(*ARGUMENTS, "--out", str(tmp_path / "whole")) == 0
    with monkeypatch.context():
        cut_after(step)
        with pytest.raises(Cut):
            run(*ARGUMENTS, "--out", str(tmp_path / "cut"))
    monkeypatch.undo()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"epoch": 3, "st')  # a line that was being written
    capfd.readouterr()
    assert run(*ARGUMENTS[:1], "--out", str(tmp_path / "cut"), "--resume") == 0
    assert f"resumed after step {step // 7 * 7} from" in capfd.readouterr().out
    assert same(tmp_path / "cut", tmp_path / "whole")
    kept = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    assert kept == ["step-00000063", "step-00000069"]


def test_a_finished_run_goes_on(run: Callable[..., int], tmp_path: Path) -> None:
    """With more epochs it is the longer run; with nothing left to do it gives the same results again."""
    longer = [*ARGUMENTS[:-2], "epochs=5", ARGUMENTS[-1]]
    assert run(*longer, "--out", str(tmp_path / "whole")) == 0
    assert run(*ARGUMENTS, "--out", str(tmp_path / "extended")) == 0
    before = results(tmp_path / "extended")[:2]
    assert run(*ARGUMENTS, "--out", str(tmp_path / "extended"), "--resume") == 0
    assert results(tmp_path / "extended")[:2] == before
    assert run(*longer, "--out", str(tmp_path / "extended"), "--resume") == 0
    assert same(tmp_path / "extended", tmp_path / "whole")


def test_another_number_of_ranks(run: Callable[..., int], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert run(*ARGUMENTS, "steps=30", "--out", out) == 0
    assert run(*ARGUMENTS[:1], "-n", "3", *ARGUMENTS[3:], "steps=null", "--out", out, "--resume") == 0
    summary, rows, _ = results(tmp_path / "run")
    # The second epoch, cut off at step 30, begins again, and 16 steps make an epoch of three ranks.
    assert (summary["ranks"], summary["steps"]) == (3, 30 + 2 * 16)
    assert [row["step"] for row in rows if "valid_loss" in row] == [23, 30, 46, 62]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "RUN holds the checkpoints of an earlier run: continue it with `hocket resume RUN`, name"),
        (["--dry-run"], "RUN holds the checkpoints of an earlier run: continue it with `hocket resume RUN`, name"),
        (["--resume", "--overwrite"], "--resume continues a run and --overwrite replaces it: give one of them"),
        (["--resume", "batch_size=16"], "RUN/config.yaml: batch_size is 32, but you asked for 16. A resumed run"),
        (["--resume", "optimizer.lr=1"], "RUN/config.yaml: optimizer.lr is 0.1, but you asked for 1. A resumed run"),
        (["--resume", "optimizer=adam"], "RUN/config.yaml: optimizer.name is sgd, but you asked for adam, "),
        (["--resume", "recipe=sgd"], "RUN/config.yaml is complete and does not need a recipe: leave out recipe="),
        (["--resume", "parameters.0.topology=exponential"], "parameters.0.topology.name: this session has exponential"),
        (["--resume", "--out", "EMPTY"], "EMPTY holds no run to resume: there is no such folder"),
        (["--resume", "--out", "."], ". holds no run to resume: it has no config.yaml"),
        (["--resume", "epochs=0"], "override 'epochs=0': epochs: epochs must be 1 or more"),
        (["--resume", "epoch=4"], "override 'epoch=4': epoch: unknown key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes(
    arguments: list[str], expected: str, run: Callable[..., int], ended: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    before = contents(ended)
    assert run(*ARGUMENTS, "--out", "RUN", *arguments) == 2
    [message] = capfd.readouterr().err.splitlines()
    assert expected in message
    assert contents(ended) == before


def test_results_are_replaced_where_that_is_asked_for(
    run: Callable[..., int], ended: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(ended / "checkpoints")
    short = [*ARGUMENTS[:-1], "steps=7", "--out", "RUN"]
    before = contents(ended)
    for more in ([], ["--dry-run"], ["batch_size=16"]):
        assert run(*short, *more) == 2
        assert capfd.readouterr().err == (
            "hocket: --out RUN holds the results of an earlier run: name another folder, or replace it with "
            "--overwrite\n"
        )
    assert contents(ended) == before
    assert run(*short, "--print-config") == 0
    assert run(*short, "batch_size=16", "--overwrite") == 0
    assert yaml.safe_load((ended / "config.yaml").read_text())["batch_size"] == 16


def test_checkpoints_of_what_is_replaced_are_removed(run: Callable[..., int], tmp_path: Path) -> None:
    out = tmp_path / "RUN"
    assert run(*ARGUMENTS, "steps=14", "--out", str(out)) == 0
    assert run(*ARGUMENTS, "steps=7", "--out", str(out), "--overwrite") == 0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000007"]


@pytest.mark.usefixtures("ended")
def test_another_recipe_than_the_folders_is_refused(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("sgd", "--out", "RUN", "--resume") == 2
    assert capfd.readouterr().err == (
        "hocket: RUN/config.yaml is a run of 'dpsgd', not of 'sgd': continue it with `hocket resume RUN`, or name "
        "another folder\n"
    )


def test_a_run_goes_on_as_it_was_but_for_what_is_given(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*ARGUMENTS, "steps=20", "--out", "RUN") == 0
    (tmp_path / "edited.yaml").write_text("recipe: dpsgd\nepochs: 9\n")
    capfd.readouterr()
    assert run("edited.yaml", "steps=21", "--out", "RUN", "--resume") == 0
    assert capfd.readouterr().err == (
        "hocket: edited.yaml differs from RUN/config.yaml in epochs: the folder's settings are used; to change a "
        "setting, write KEY=VALUE\n"
    )
    monkeypatch.setattr(sys, "argv", ["hocket", "resume", "RUN", "steps=30"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "resumed after step 21 from" in capfd.readouterr().out
    config = yaml.safe_load((tmp_path / "RUN" / "config.yaml").read_text())
    found = (
        config["ranks"],
        config["transport"],
        config["epochs"],
        config["steps"],
        config["checkpoint"]["every"],
    )
    assert found == (2, "virtual", 3, 30, 7)
    assert results(tmp_path / "RUN")[0]["steps"] == 30
    monkeypatch.setattr(sys, "argv", ["hocket", "resume", "RUN"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "the run has already ended, so only its results are written again" in capfd.readouterr().out


FAILING = """
from dataclasses import dataclass
from hocket.task import Digits

@dataclass(frozen=True)
class Failing(Digits):
    def loss(self, output, target):
        raise ValueError("broken on purpose")
"""


def test_a_run_that_fails_before_its_first_step_has_replaced_nothing(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_task.py").write_text(FAILING)
    arguments = [*ARGUMENTS[:-1], "steps=5", "--overwrite", "--out", "RUN"]
    assert run(*arguments) == 0
    before = contents(tmp_path / "RUN")
    with pytest.raises(ValueError, match="broken on purpose"):
        run(*arguments, "task=failing_task:Failing")
    assert contents(tmp_path / "RUN") == before
    with pytest.raises(ValueError, match="broken on purpose"):
        run(*arguments[:-1], "NEW", "task=failing_task:Failing")
    assert not (tmp_path / "NEW").exists()


def test_a_run_that_was_cut_off_leaves_nothing_of_the_one_before(
    run: Callable[..., int], cut_after: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*ARGUMENTS[:-1], "--overwrite", "--out", str(tmp_path / "RUN")]
    assert run(*arguments, "steps=5") == 0
    cut_after(13)
    with pytest.raises(Cut):
        run(*arguments, "batch_size=16")
    left = {name for name in contents(tmp_path / "RUN") if not name.startswith("source/")}
    assert left == {".hocket.json", "config.yaml", "metrics.jsonl", "run.json"}
    assert yaml.safe_load((tmp_path / "RUN" / "config.yaml").read_text())["batch_size"] == 16


def test_a_run_without_checkpoints_is_begun_anew(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*ARGUMENTS[:-1], "steps=2", "--out", "RUN") == 0
    capfd.readouterr()
    assert run(*ARGUMENTS, "--out", "RUN", "--resume") == 2
    [message] = capfd.readouterr().err.splitlines()
    again = "hocket run RUN/config.yaml --out RUN --overwrite"
    assert message == (
        f"hocket: there is no complete checkpoint in RUN/checkpoints. `{again}` begins the run anew"
    )
    assert run(*again.split()[2:]) == 0


def test_resume_needs_a_folder(run: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*ARGUMENTS, "--resume") == 2
    assert capfd.readouterr().err == "hocket: --resume continues the run in a folder: name it with --out\n"


@pytest.mark.parametrize(
    ("setting", "named"), [("every=0", "every must be 1 or more, not 0"), ("keep=0", "keep must")]
)
def test_settings_are_checked(
    setting: str, named: str, run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("sgd", f"checkpoint.{setting}") == 2
    message = capfd.readouterr().err
    assert message.startswith(
        f"hocket: override 'checkpoint.{setting}': checkpoint.{setting.partition('=')[0]}: {named}"
    )
