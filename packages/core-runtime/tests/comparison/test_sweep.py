"""`hocket sweep`: its runs are those of `hocket run`, none is run twice, and what was interrupted goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hocket.cli.combinations import combinations
from hocket.strategy import compose
from hocket.training.run import resolved

#: Carries out a command: its status and what it printed.
Hocket = Callable[..., Any]

SHORT = ("epochs=2", "-n", "2", "--transport", "virtual")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


def assert_same(one: Path, other: Path) -> None:
    expected, given = weights(one), weights(other)
    assert expected.keys() == given.keys()
    assert all(torch.equal(value, given[name]) for name, value in expected.items())


def written(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


def test_runs_are_those_of_hocket_run_and_none_is_run_twice(
    hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("sweep", "sgd", "strategy=sgd,dpsgd", "seed=0,1", *SHORT, "--jobs", "2")
    first = hocket(*command)
    assert first.status == 0, first.err
    folder = tmp_path / "sweeps" / "sgd"
    names = {f"{recipe},seed={seed}" for recipe in ("sgd", "dpsgd") for seed in (0, 1)}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == names
    assert hocket("run", "dpsgd", "seed=1", *SHORT, "--out", "alone").status == 0
    assert_same(tmp_path / "alone", folder / "dpsgd,seed=1")
    assert "dpsgd (2 seeds)" in first.out
    assert (folder / "index.html").exists()

    [started] = json.loads((folder / "run.json").read_text())
    assert started["command"] == "hocket " + " ".join(command)
    [of_run] = json.loads((folder / "sgd,seed=0" / "run.json").read_text())
    assert of_run["command"] == "hocket run sweeps/sgd/sgd,seed=0/run.yaml --out sweeps/sgd/sgd,seed=0"

    times = written(folder)
    (folder / "sgd,seed=0" / "summary.json").unlink()
    again = hocket(*command)
    assert again.status == 0, again.err
    assert again.out.count("has ended before") == 3
    assert "[4/4] sgd,seed=0: validation loss" in again.out
    assert {name for name, time in written(folder).items() if times[name] == time} == names - {"sgd,seed=0"}
    other = hocket(*command, "batch_size=8")
    assert other.status == 2
    assert (
        "holds another run: batch_size is 32, but you asked for 8. Name another folder with --out"
        in other.err
    )


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_result_stands_before_the_run_that_takes_its_place(hocket: Hocket, tmp_path: Path) -> None:
    lines = hocket("sweep", "sgd", "seed=0,1,2", "steps=2", "--out", str(tmp_path)).out.splitlines()[1:7]
    told = [line.partition(": validation")[0] for line in lines]
    assert told == [
        text for seed in range(3) for text in (f"seed={seed}: begins", f"[{seed + 1}/3] seed={seed}")
    ]


@pytest.mark.full
@pytest.mark.timeout(180)
def test_settings_that_recipes_bring_are_said(hocket: Hocket, tmp_path: Path) -> None:
    (tmp_path / "adam.yaml").write_text(
        "recipe: dpsgd\nname: adam\noptimizer: {name: adamw, lr: 1, weight_decay: 0.5}\n"
    )
    strategies = f"strategy=sgd,dpsgd,{tmp_path}/adam.yaml"
    command = ("sweep", "sgd", strategies, "steps=2", "-n", "2", "--transport", "virtual")
    ended = hocket(*command, "optimizer.lr=0.02,0.03", "--out", str(tmp_path / "out"))
    assert ended.status == 0, ended.err
    first, *lines = ended.out.splitlines()
    assert first.startswith("6 runs")
    assert lines[0] == "runs differ in optimizer.name: sgd in sgd, dpsgd; adamw in adam"
    assert lines[1].startswith("runs differ in optimizer.weight_decay: 0")
    assert "begins" in lines[2]
    banner = ended.out.rpartition("validation")[2].partition("bytes/step")[0]
    assert "runs differ in optimizer.name: sgd in " in banner
    assert "runs differ in optimizer.lr: 0.02 in " in banner
    assert "runs differ in strategy" not in ended.out


@pytest.mark.timeout(180)
def test_what_was_interrupted_goes_on(hocket: Hocket, tmp_path: Path) -> None:
    steps = ["steps=60", "log_every=5"]
    late = "delays={name: fixed, ranks: [0], seconds: 0.15}"
    cut = tmp_path / "cut"
    sweep = ["sweep", "sgd", "seed=0,1", *steps, late, "--jobs", "2", "--out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hocket", *sweep, str(cut)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = [cut / f"seed={seed}" / "metrics.jsonl" for seed in (0, 1)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.stat().st_size for path in metrics):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    meanwhile = hocket(*sweep, str(cut))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    told = [line for line in err.splitlines() if line]
    assert told == [
        "the runs save themselves and end; the same command continues them",
        "hocket: interrupted",
    ]
    assert (meanwhile.status, len(meanwhile.err.splitlines())) == (2, 1)
    assert f"another sweep, or one of its runs, is still writing to {cut}" in meanwhile.err
    assert not written(cut)

    assert hocket(*sweep, str(cut)).status == 0
    for seed in (0, 1):
        assert "resumed after step" in (cut / f"seed={seed}" / "output.txt").read_text()
        whole = tmp_path / f"whole-{seed}"
        assert hocket("run", "sgd", f"seed={seed}", *steps, "--out", str(whole)).status == 0
        assert_same(whole, cut / f"seed={seed}")


@pytest.mark.full
def test_a_run_that_fails_leaves_the_others(
    hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = """
        from hocket.errors import UserError
        from hocket.task import Digits


        class Picky(Digits):
            def data(self, seed):
                if seed == 1:
                    raise UserError("seed 1 is no good")
                return super().data(seed)
    """
    (tmp_path / "picky.py").write_text(textwrap.dedent(task))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    ended = hocket("sweep", "sgd", "seed=0,1,2", "task=picky:Picky", "steps=3", "--out", "out")
    assert ended.status == 1
    assert "seed=1: failed with exit status 2: seed 1 is no good (out/seed=1/output.txt)" in ended.out
    assert ended.err == "hocket: 1 of 3 runs have failed: seed=1; the same command tries them again\n"
    assert "run (2 seeds)" in ended.out or "sgd (2 seeds)" in ended.out


@pytest.mark.timeout(180)
def test_runs_of_other_code_are_not_mixed_silently(
    hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "from hocket.task import Digits\n\n\nclass Coded(Digits):\n    pass\n"
    (tmp_path / "coded.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    command = (
        "sweep",
        "sgd",
        "task=coded:Coded",
        "steps=3",
        "compute={step_s: 0.01}",
        *SHORT[1:],
        "--out",
        "out",
    )
    assert hocket(*command, "seed=1,2").err == ""
    assert "seed=1: has ended before" in hocket(*command, "seed=1,2").out
    (tmp_path / "coded.py").write_text(task.replace("pass", "x = 1"))
    refused = hocket(*command, "seed=1,2,3")
    assert (refused.status, refused.out) == (2, "")
    assert "out/seed=1 holds a run with other code: coded.py changed since" in refused.err
    assert not (tmp_path / "out" / "seed=3").exists()

    later = hocket(*command, "seed=3")
    assert later.status == 0, later.err
    ended = hocket("compare", "out")
    told = "coded.py differs between: run; seed=1, seed=2"
    assert ended.err == f"hocket: the runs used different code: {told}\n"


@pytest.mark.full
@pytest.mark.timeout(180)
def test_no_run_is_started_by_code_that_changed_since_the_sweep_began(
    hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = """
        from pathlib import Path

        from hocket.task import Digits


        class Editing(Digits):
            def data(self, seed):
                if seed == 1:
                    Path("edited_meanwhile.py").write_text("x = 2")
                return super().data(seed)
    """
    (tmp_path / "editing.py").write_text("import edited_meanwhile\n" + textwrap.dedent(task))
    (tmp_path / "edited_meanwhile.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    command = ("sweep", "sgd", "task=editing:Editing", "steps=3", "seed=0,1,2,3", "--out", "out")
    ended = hocket(*command)
    assert ended.status == 1
    assert written(tmp_path / "out").keys() == {"seed=0", "seed=1"}
    assert "seed=2: begins" not in ended.out
    first, *_, last = ended.err.splitlines()
    assert first == "hocket: edited_meanwhile.py changed since the sweep began: no further run is started"
    assert last.startswith("hocket: 2 of 4 runs were not started: seed=2, seed=3; restore the module")
    assert ended.err.count("no further run") == 1


@pytest.mark.full
@pytest.mark.timeout(180)
def test_runs_and_sweeps_do_not_share_a_folder(
    hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("steps=2", "-n", "2", "--transport", "virtual")
    assert hocket("sweep", "sgd", "seed=0,1", *short, "--out", "swept").status == 0
    before = (tmp_path / "swept" / "run.json").read_text()
    for more in ((), ("--overwrite",), ("--dry-run",)):
        ended = hocket("run", "sgd", *short, "--out", "swept", *more)
        assert (ended.status, ended.out) == (2, "")
        assert ended.err == (
            "hocket: --out swept holds runs (seed=0, seed=1). A run in the same folder would hide them from `hocket "
            "compare swept`: name a folder inside it, such as swept/NAME, or another folder\n"
        )
    assert (tmp_path / "swept" / "run.json").read_text() == before
    assert hocket("run", "sgd", *short, "seed=2", "--out", "swept/seed=2").status == 0
    refused = hocket("sweep", "sgd", "seed=0,1", *short, "--out", "swept/seed=2")
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.startswith("hocket: --out swept/seed=2 is the folder of a run")


def test_a_strategy_replaces_that_of_a_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "batch_size: 8\nstrategy: {gradients: [{collective: allreduce, segments: layers}]}\nphases: {5: {}}\n"
    )
    sgd, dpsgd = (each.run for each in combinations(str(file), ["strategy=sgd,dpsgd"], 4, None))
    assert [run.batch_size for run in (sgd, dpsgd)] == [8, 8]
    assert [run.strategy.name for run in (sgd, dpsgd)] == ["sgd", "dpsgd"]
    assert (len(dpsgd.strategy.gradients), len(dpsgd.strategy.parameters)) == (0, 1)
    assert len(sgd.strategy.phases) == len(dpsgd.strategy.phases) == 0


def test_variants_stand_beside_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("recipe: periodic_average\nparameters.0.every: 3\nbatch_size: 16\n")
    Path("base.yaml").write_text("batch_size: 8\nparameters: [{collective: allreduce}]\n")
    strategies = "strategy=periodic_average,mine.yaml, periodic_average  parameters.0.every=2 batch_size=4"
    for target, batch_sizes in (("sgd", [32, 16, 4]), ("base.yaml", [8, 8, 4])):
        found = combinations(target, [strategies, "epochs=2"], 4, None)
        assert [each.name for each in found] == [
            "periodic_average",
            "mine",
            "periodic_average,parameters.0.every=2,batch_size=4",
        ]
        assert [each.run.strategy.parameters[0].every for each in found] == [8, 3, 2]
        assert [each.run.batch_size for each in found] == batch_sizes
        assert {each.run.epochs for each in found} == {2}
    common = "optimizer={name: sgd, lr: 0.1, momentum: 0.9}"
    for chosen in combinations("sgd", ["strategy=sgd,sgd optimizer.lr=0.05", common], 4, None):
        settings = resolved(chosen.run)["optimizer"]
        assert (settings["lr"], settings["momentum"]) == (0.05 if "0.05" in chosen.name else 0.1, 0.9)
    sparse = "gradients.0={collective: sparse_allreduce, compressor: {name: topk, density: 0.1}}"
    one, other = (each.run for each in combinations("sgd", [f"strategy=sgd,sgd {sparse}"], 4, None))
    assert other.strategy == compose("sgd", sparse)
    assert one.strategy == compose("sgd")


def test_commas_within_brackets_and_quotes_divide_nothing() -> None:
    late = "delays={name: fixed, ranks: [0, 1], seconds: 0.1},{name: random_subset, count: 1, seconds: 1}"
    found = combinations("sgd", [late, 'description="one, two"', "seed=3"], 4, "virtual")
    assert [type(each.run.delays).__name__ for each in found] == ["Fixed", "RandomSubset"]
    assert {(each.run.description, each.run.seed) for each in found} == {("one, two", 3)}
    assert len({each.name for each in found}) == 2
    assert all("/" not in each.name and " " not in each.name for each in found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sgd", "sed=0,1"], "override 'sed=0': sed: unknown key. "),
        (["sgd", "sed=0,1"], "Did you mean 'seed'?"),
        (["sgd", "strategy=sgd,dspgd"], "there is no recipe 'dspgd'. Did you mean 'dpsgd'"),
        (
            ["sgd", "strategy=sgd seed=1,dpsgd", "seed=0,1"],
            "seed is given twice: in strategy=sgd seed=1, and by itself",
        ),
        (
            ["sgd", "strategy=sgd,agd gradients.0.every=1", "strategy.gradients.0.every=1"],
            "gradients.0.every is given twice: in strategy=agd gradients.0.every=1, and by itself",
        ),
        (
            ["sgd", "strategy=sgd,dpsgd parameters.1.every=2"],
            "override 'parameters.1.every=2': parameters.1: parameters has 1 exchange",
        ),
        (["sgd", "strategy=sgd,mine.yaml"], "mine.yaml: cannot read the file: No such file or directory"),
        (["sgd", "strategy="], "strategy: got null; allowed: a mapping of samples, gradients, parameters"),
        (["sgd", "recipe=sgd,agd"], "recipe=sgd,agd: in a sweep, write strategy=sgd,agd"),
        (["sgd", "seed"], "override 'seed': not of the form KEY=VALUE"),
        (["sgd", "seed=0,,1"], "'seed=0,,1': a value is missing before or after a comma"),
        (["sgd", "seed=0,1,0"], "'seed=0,1,0': the value 0 is given twice"),
        (
            ["sgd", "seed=0", "seed=1"],
            "seed is given twice: give it once, with commas between its values",
        ),
        (["sgd", "seed=0,x"], "override 'seed=x': seed: got 'x'; allowed: an integer"),
        (["sgd", "task=digits,digit"], "override 'task=digit': task: there is no task 'digit'"),
        (["sgd", "optimizer.lr=0.1,high"], "optimizer"),
        (
            ["hierarchical_sgd", "seed=0,1", "--out", "file/within"],
            "--out file/within cannot be written: Not a directory",
        ),
        (
            ["sgd", "seed=0,1", "-n", "5", "--hosts", "localhost:4"],
            "-n 5, but the hosts have slots for only 4 ranks",
        ),
        (["absent.yaml", "seed=0,1"], "absent.yaml: cannot read the file"),
    ],
)
def test_mistakes_start_nothing(
    arguments: list[str], expected: str, hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    ended = hocket("sweep", *arguments)
    assert (ended.status, ended.out) == (2, ""), ended.out
    assert ended.err.startswith("hocket: ")
    assert expected in " ".join(ended.err.splitlines())
    assert len(ended.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_in_a_launcher(hocket: Hocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    ended = hocket("sweep", "sgd", "seed=0,1")
    assert ended.err == "hocket: hocket sweep starts the ranks itself: call it without MPICH's mpiexec\n"


def test_a_dry_run_lists_the_runs_and_starts_none(
    hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = (
        "sweep",
        "sgd",
        "strategy=sgd,dpsgd",
        "seed=0,1",
        "steps=1",
        "-n",
        "2",
        "--transport",
        "virtual",
    )
    dry = hocket(*command, "--dry-run")
    assert dry.status == 0, dry.err
    assert dry.out.startswith("would start 4 runs, 1 at a time, results in sweeps/sgd\n")
    assert "\ndpsgd,seed=1: 2 ranks, would begin\n" in dry.out
    assert not [*tmp_path.iterdir()]
    wrong = hocket("sweep", "sgd", "strategy=sgd,dspgd", "--dry-run")
    assert (wrong.status, wrong.out) == (2, "")


def test_exchanges_that_were_never_due_are_said_of_each_run(hocket: Hocket, tmp_path: Path) -> None:
    command = (
        "sweep",
        "sgd",
        "strategy=sgd,periodic_average",
        "steps=3",
        "-n",
        "2",
        "--transport",
        "virtual",
    )
    ended = hocket(*command, "--out", str(tmp_path))
    assert ended.status == 0, ended.err
    warning = "parameters.0 never takes place: it is due every 8 steps, but training ends after step 3"
    [line] = [each for each in ended.out.splitlines() if "] periodic_average: validation" in each]
    assert f"; warning: {warning}" in line
    assert "; warning" not in next(each for each in ended.out.splitlines() if "] sgd: validation" in each)
    assert f"hocket: periodic_average (!): {warning}" in ended.err
    assert re.search(r"^(run .*)?periodic_average \(!\)(  |$)", ended.out, re.M)
    summary = json.loads((tmp_path / "periodic_average" / "summary.json").read_text())
    assert [each.partition(". ")[0] for each in summary["warnings"]] == [warning]
    page = (tmp_path / "index.html").read_text()
    assert f'<p class="note">periodic_average (!): {warning}' in page
    # Without computing time there are no steps a second.
    assert "no computing" in ended.out
    assert "sgd, periodic_average: no computing time was set (compute.step_s)" in ended.err
    assert 'class="bars"' not in page
