"""Loggers: what a run and a session write, also where a run goes on after it was interrupted."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from wandb.proto import wandb_internal_pb2

import hocket
from hocket.cli.checking import check_run
from hocket.cli.ranking import run_virtual
from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.loggers import Csv, TensorBoard
from hocket.results.files import Results
from hocket.training.run import load_run
from hocket.transport.virtual import VirtualWorld

LOGGERS = "loggers=[csv, tensorboard, {name: wandb, mode: offline}]"
RUN = ("ranks=2", "batch_size=64", "log_every=4", "checkpoint.every=8", LOGGERS)


def json_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def tensorboard_steps(folder: Path, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def check_that_all_say_the_same(folder: Path) -> list[int]:
    """Return the steps of the rows that every logger has."""
    rows, cells = json_rows(folder), csv_rows(folder)
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells, strict=True):
        assert {name: value for name, value in cell.items() if value} == {
            name: str(value)
            for name, value in row.items()
            if value is not None and not isinstance(value, list)
        }
    steps = [row["step"] for row in rows]
    assert len(set(steps)) == len(steps)
    for name in ("train_loss", "valid_loss", "bytes_sent"):
        told = tensorboard_steps(folder, name)
        assert [step for step, _ in told] == [row["step"] for row in rows if name in row]
        assert [value for _, value in told] == pytest.approx(
            [row[name] for row in rows if name in row], rel=1e-6
        )
    return steps


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, behind a header of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is empty
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def wandb_steps(folder: Path) -> list[int]:
    """Return the steps of the rows of all offline runs in a folder, in the order in which they were written."""
    steps = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # which it makes when imported
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    return steps


def test_a_run_that_goes_on_has_each_row_once_in_every_logger(tmp_path: Path) -> None:
    run_virtual(load_run("sgd", [*RUN, "steps=11", "epochs=2"]), tmp_path)
    assert check_that_all_say_the_same(tmp_path)[-2:] == [8, 11]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000011")  # as if it had been killed before
    run_virtual(load_run("sgd", [*RUN, "epochs=2"]), tmp_path, resume=True)
    assert check_that_all_say_the_same(tmp_path) == [4, 8, 12, 16, 20, 24]
    assert wandb_steps(tmp_path) == [4, 8, 11, 12, 16, 20, 24]  # it takes no row back


def test_rows_beyond_the_resumed_step_stay_until_the_first_new_one(tmp_path: Path) -> None:
    """A run that dies before may go on from a later checkpoint, which the disk showed late: these are its rows."""
    results = Results(tmp_path, ["host"])
    results.begin()
    for step in range(5):
        results.write({"step": step, "loss": 1.0})
    results.close()
    for resumed_after, kept in ((2, [0, 1, 2, 3, 4]), (3, [0, 1, 2, 3])):
        results = Results(tmp_path, ["host"])
        results.resume_after(resumed_after)
        results.begin()
        if resumed_after == 3:
            results.write({"step": 4, "loss": 2.0})
        results.close()
        assert [row["step"] for row in json_rows(tmp_path) if row["loss"] == 1.0] == kept
    assert json_rows(tmp_path)[-1] == {"step": 4, "loss": 2.0}


def test_a_session_logs_what_rank_0_is_given(tmp_path: Path) -> None:
    def train(steps: int, begun: Path | None) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd") as session:
            if begun:
                session.load(begun)
            session.open_log(tmp_path / "log", "jsonl", Csv(), TensorBoard())
            while session.step < steps:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 3)).square().mean()
                loss.backward()
                optimizer.step()
                session.log({"loss": loss, "rank": session.rank})
                if session.step == 2:
                    session.save(tmp_path / "checkpoints")

    VirtualWorld(2).run(lambda: train(4, None))
    assert [(row["step"], row["rank"]) for row in json_rows(tmp_path / "log")] == [
        (n, 0) for n in range(1, 5)
    ]
    VirtualWorld(2).run(lambda: train(5, tmp_path / "checkpoints"))
    folder = tmp_path / "log"
    assert [row["step"] for row in json_rows(folder)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in csv_rows(folder)] == ["1", "2", "3", "4", "5"]
    assert [step for step, _ in tensorboard_steps(folder, "loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_told_before_anything_is_trained(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "hocket.loggers.services.find_spec", lambda name: None if name == library else find(name)
    )
    install = re.escape(how_to_install("hocket-core", library))
    with pytest.raises(UserError, match=rf"^logger {library}: .* {install}, or leave it out"):
        check_run(load_run("sgd", [f"loggers=[{library}]"]))


def test_exchanges_stand_in_torchs_profile() -> None:
    def train() -> set[str]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profile = torch.profiler.profile() if hocket.join().rank == 0 else nullcontext()
        strategy = hocket.compose("agd", "gradients.0.segments=layers")
        with hocket.attach(model, optimizer, strategy) as session, profile as found:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            session.gather(None)
        events = [] if found is None else found.key_averages()
        return {event.key for event in events if event.key.startswith("hocket: ")}

    told, _ = VirtualWorld(2).run(train)
    assert told == {f"hocket: {what} gradients.0[{n}]" for what in ("start", "wait for") for n in range(2)}
