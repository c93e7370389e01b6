"""A file that cannot grow any more: one line with its path, and what was written before stays."""

from __future__ import annotations

import contextlib
import csv
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import WriteError
from hocket.loggers import Csv, JsonLines, Logger, TensorBoard

Hocket = Callable[..., Any]

RUN = ("run", "sgd", "-n", "1", "--transport", "virtual", "log_every=1", "-q", "--out", "RUN")


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let no file of this process become larger, as if the disk were full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete rows in JSON lines, or else in the table, of a folder."""
    if (folder / "metrics.jsonl").exists():
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]


def steps_of_events(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [event.step for event in found.Scalars("loss")]


@pytest.mark.parametrize(
    ("logger", "name", "steps"),
    [
        (JsonLines(), "metrics.jsonl", steps_in),
        (Csv(), "metrics.csv", steps_in),
        (TensorBoard(), "tensorboard/events.out", steps_of_events),
    ],
    ids=["jsonl", "csv", "tensorboard"],
)
def test_a_log_that_cannot_grow_names_its_file_and_keeps_its_rows(
    logger: Logger, name: str, steps: Callable[[Path], list[int]], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    log = logger.open(tmp_path, {}, None)
    rows = 0

    def write_on() -> None:
        nonlocal rows
        while True:
            log.write({"step": rows, "loss": 0.5})
            rows += 1

    with files_end_at(2000):
        with pytest.raises(WriteError, match=rf"^{tmp_path}/{name}[^ ]* cannot be written: File too large$"):
            write_on()
        with contextlib.suppress(WriteError):
            log.close()
    assert rows > 10
    assert steps(tmp_path)[:rows] == [*range(rows)]
    again = logger.open(tmp_path, {}, rows - 1)
    again.write({"step": rows, "loss": 0.5})
    again.close()
    assert steps(tmp_path) == [*range(rows + 1)]


@pytest.mark.usefixtures("drawn_pictures")
@pytest.mark.parametrize(
    ("size", "width", "name"),
    [(4500, 4, "metrics.jsonl"), (15_000, 128, "model.safetensors"), (15_000, 4, "metrics.png")],
)
def test_a_run_ends_with_the_file_that_cannot_be_written(
    size: int, width: int, name: str, hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with files_end_at(size):
        ended = hocket(*RUN, "steps=30", f"task.hidden={width}")
    assert (ended.status, ended.err) == (
        1,
        f"hocket: WriteError: RUN/{name} cannot be written: File too large\n",
    )
    kept = steps_in(tmp_path / "RUN")
    assert kept == [*range(1, len(kept) + 1)]
    assert len(kept) > 5
    assert not list((tmp_path / "RUN").rglob("*.hocket-tmp"))
