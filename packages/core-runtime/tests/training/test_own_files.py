"""What a command does with files in its folder that it has not written: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.disk import locked
from hocket.errors import UserError
from hocket.loggers import TensorBoard
from hocket.results.files import files_of
from hocket.transport.virtual import VirtualWorld

Hocket = Callable[..., Any]

RUN = ("run", "local", "-n", "1", "--transport", "virtual", "steps=2", "-q", "--out", "RUN")
ALL = files_of((TensorBoard(),), trace=True, report=False)
WITH_ALL = (*RUN, "--trace", "loggers=[tensorboard]")
FAILING = """
from dataclasses import dataclass
from hocket.task import Digits

@dataclass(frozen=True)
class Failing(Digits):
    def loss(self, output, target):
        raise ValueError("broken on purpose")
"""


@pytest.fixture(autouse=True)
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("weeks of work")


@pytest.mark.parametrize(
    "more", [(), ("--overwrite",), ("--dry-run",)], ids=lambda more: " ".join(more) or "run"
)
@pytest.mark.parametrize("name", ALL)
def test_a_file_of_somebody_else_ends_a_run_before_it_begins(
    name: str, more: tuple[str, ...], hocket: Hocket, within: Path
) -> None:
    put(within / "RUN" / (name if "." in name else f"{name}/best.pt"))
    before = contents(within)
    ended = hocket(*WITH_ALL, *more)
    assert ended.status == 2
    assert ended.err.startswith(f"hocket: --out RUN holds {name}, which Hocket did not write")
    assert contents(within) == before


def test_what_does_not_stand_in_the_way_stays(hocket: Hocket, within: Path) -> None:
    for name in ("notes.txt", "source/mine.py", "report.html", "data/x"):
        put(within / "RUN" / name)
    before = contents(within)
    assert hocket(*RUN).status == 0
    assert hocket(*RUN, "--overwrite").status == 0
    assert contents(within).items() >= before.items()


def test_another_run_in_hockets_folder_replaces_what_hocket_wrote_alone(hocket: Hocket, within: Path) -> None:
    folder = within / "RUN"
    assert hocket(*WITH_ALL, "checkpoint.every=1").status == 0
    theirs = ("tensorboard/events.out.tfevents.1.mine", "checkpoints/best.pt")
    for name in theirs:
        put(folder / name)
    events = sorted(folder.glob("tensorboard/*.hocket"))
    assert hocket(*WITH_ALL, "--overwrite", "steps=1", "checkpoint.every=1").status == 0
    assert all((folder / name).read_text() == "weeks of work" for name in theirs)
    assert len(events) == len(sorted(folder.glob("tensorboard/*.hocket"))) == 1
    assert not events[0].exists()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best.pt", "step-00000001"]


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_checkpoint_that_is_not_hockets_alone_ends_a_run_before_it_begins(
    name: str, hocket: Hocket, within: Path
) -> None:
    assert hocket(*RUN, "checkpoint.every=1").status == 0
    put(within / "RUN" / "checkpoints" / "step-00000002" / name)
    before = contents(within)
    ended = hocket(*RUN, "--overwrite")
    assert (ended.status, ended.err.partition(" so it ")[0]) == (
        2,
        "hocket: --out RUN/checkpoints: step-00000002 holds files that Hocket did not write, or a damaged manifest,",
    )
    assert contents(within) == before


def test_a_run_that_fails_at_once_leaves_the_one_before(
    hocket: Hocket, within: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(within))
    (within / "failing_at_once.py").write_text(FAILING)
    assert hocket(*WITH_ALL, "checkpoint.every=1").status == 0
    before = contents(within / "RUN")
    with pytest.raises(ValueError, match="broken on purpose"):
        hocket(*WITH_ALL, "--overwrite", "task=failing_at_once:Failing")
    now = contents(within / "RUN")
    assert {name: now[name] for name in now if not name.startswith("trace-recordings/")} == before
    assert hocket("resume", "RUN", "steps=3", "-q").status == 0


def test_two_runs_at_once_do_not_share_a_folder(hocket: Hocket, within: Path) -> None:
    (within / "RUN").mkdir()
    with locked(within / "RUN", "other"):
        ended = hocket(*RUN)
    assert ended.status == 2
    assert ended.err.startswith(
        "hocket: --out RUN: another run is writing to this folder (run other, process "
    )
    assert hocket(*RUN).status == 0


@pytest.mark.parametrize(
    "name", ["run.json", "index.html", "seed=0", "seed=0/output.txt", "seed=1/model.safetensors"]
)
def test_a_file_of_somebody_else_ends_a_sweep_before_it_begins(
    name: str, hocket: Hocket, within: Path
) -> None:
    put(within / "SWEEP" / name)
    before = contents(within)
    ended = hocket(
        "sweep", "local", "seed=0,1", "steps=1", "-n", "1", "--transport", "virtual", "--out", "SWEEP"
    )
    assert ended.status == 2
    assert f" holds {name.rpartition('/')[2]}, which Hocket did not write" in ended.err
    assert {key: value for key, value in contents(within).items() if ".sweep.lock" not in key} == before


def test_a_page_of_somebody_else_is_not_replaced(hocket: Hocket, within: Path) -> None:
    pytest.importorskip("plotly")
    assert hocket(*RUN).status == 0
    put(within / "site" / "index.html")
    ended = hocket("compare", "RUN", "--out", "site")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("hocket: --out site holds index.html, which Hocket did not write")
    assert (within / "site" / "index.html").read_text() == "weeks of work"
    for _ in range(2):
        assert hocket("compare", "RUN", "--out", "page").status == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv", "tensorboard/events.out.tfevents.1"])
def test_a_log_of_somebody_else_is_not_replaced(name: str, within: Path) -> None:
    put(within / "log" / name)

    def train() -> None:
        model = nn.Linear(1, 1)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            session.open_log("log", "jsonl", "csv", "tensorboard")

    with pytest.raises(UserError, match=f"log holds {name.partition('/')[0]}, which Hocket did not"):
        VirtualWorld(1).run(train)
    assert (within / "log" / name).read_text() == "weeks of work"
