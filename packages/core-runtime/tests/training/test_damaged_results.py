"""A run's folder of which a file is damaged: commands go on or say one line, and lose nothing."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Hocket = Callable[..., Any]

ARGUMENTS = (
    "sgd",
    "-n",
    "1",
    "--transport",
    "virtual",
    "log_every=1",
    "checkpoint.every=4",
    "loggers=[csv, tensorboard]",
    "--trace",
    "-q",
)
RESUME = ("resume", "RUN", "steps=9", "-q")
COMMANDS = (
    RESUME,
    ("compare", "RUN"),
    ("run", *ARGUMENTS, "steps=1", "--out", "RUN"),
    ("recommend", "RUN", "--hosts", "2x1", "--step", "100ms"),
)


@pytest.fixture(scope="module")
def made(hocket: Hocket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that has ended, with two checkpoints."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("damaged") / "RUN"
    assert hocket("run", *ARGUMENTS, "steps=8", "--out", str(folder)).status == 0
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    shutil.copytree(made, tmp_path / "RUN")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "RUN"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(folder: Path) -> tuple[list[int], list[int]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "metrics.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    return [row["step"] for row in rows], [int(row["step"]) for row in cells]


@pytest.mark.parametrize(
    "content",
    [
        "",
        '[{"sources": [1]}]',
        *(pytest.param(each, marks=pytest.mark.full) for each in ("[", "{}", "[1]", "[" * 9000, "null")),
    ],
)
def test_a_run_goes_on_without_what_started_it(
    content: str, hocket: Hocket, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "run.json").write_text(content)
    ended = hocket(*RESUME)
    assert (ended.status, ended.err) == (0, "")
    assert caplog.messages == ["RUN/run.json is damaged: its content is kept as run.json.damaged-1"]
    assert (run / "run.json.damaged-1").read_text() == content
    assert [start["command"].split()[1] for start in json.loads((run / "run.json").read_text())] == ["resume"]
    assert (run / "model.safetensors").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] == 9


@pytest.mark.parametrize("line", ['{"epoch": 1, "st', "", "\0\0\0", "[]", '{"step": "x"}'])
def test_a_damaged_line_of_metrics_costs_that_line(
    line: str, hocket: Hocket, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("metrics.jsonl", "metrics.csv"):
        lines = (run / name).read_text().splitlines()
        lines[3] = line
        (run / name).write_text("\n".join(lines) + "\n")
    damaged = (run / "metrics.jsonl").read_bytes()
    assert hocket("compare", "RUN").status == 0
    assert caplog.messages == ["RUN/metrics.jsonl: 1 of 8 lines are damaged and were skipped"]
    assert hocket(*RESUME).status == 0
    assert steps(run) == ([1, 2, 3, 5, 6, 7, 8, 9], [1, 2, 4, 5, 6, 7, 8, 9])
    assert (run / "metrics.jsonl.damaged-1").read_bytes() == damaged


def test_a_configuration_that_ends_early_is_refused_wherever_it_was_cut(hocket: Hocket, run: Path) -> None:
    text = (run / "config.yaml").read_text()
    for cut in sorted(random.Random(0).sample(range(len(text) - 5), 12)):
        (run / "config.yaml").write_text(text[:cut])
        before = contents(run)
        for command in (RESUME, ("compare", "RUN"), COMMANDS[-1]):
            ended = hocket(*command)
            assert (ended.status, ended.err.count("\n"), ended.out) == (2, 1, "")
            assert ended.err.startswith(
                (
                    "hocket: RUN/config.yaml cannot be read: ",
                    "hocket: RUN/config.yaml: ",
                    "hocket: RUN/config.yaml ends early",
                )
            )
        assert contents(run) == before


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def blank(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    size = draw.randrange(1, 4096)
    return content[:place] + bytes(len(content[place : place + size])) + content[place + size :]


def retype(content: bytes, draw: random.Random) -> bytes:
    """Put a value of another type in place of one in JSON or YAML; cut where it is neither."""
    try:
        tree = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError):
        return cut(content, draw)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                collect(node[key])

    if not isinstance(tree, dict | list):
        return cut(content, draw)
    collect(tree)
    node, key = draw.choice(places)
    node[key] = draw.choice([None, -5, 2.5, "x", [], {}, True, 10**30, "nan"])
    return (json.dumps(tree) if content[:1] in b"[{" else yaml.safe_dump(tree, explicit_end=True)).encode()


def names(folder: Path) -> list[str]:
    """The files that a run leaves, which all may be damaged."""
    return sorted(contents(folder))


def test_every_file_of_a_run_may_be_drawn(run: Path) -> None:
    own = [name for name in names(run) if not name.startswith("source/")]  # which holds the tests themselves
    kinds = {re.sub(r"\d+|events.*", "*", name) for name in own}
    assert kinds == {
        ".hocket.json",
        "checkpoints/step-*/manifest.json",
        "checkpoints/step-*/rank-*.safetensors",
        "config.yaml",
        "metrics.csv",
        "metrics.jsonl",
        "metrics.png",
        "model.safetensors",
        "run.json",
        "summary.json",
        "tensorboard/*",
        "trace.json.gz",
    }


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(each, marks=pytest.mark.full) for each in range(5, 600))]
)
def test_damage_ends_in_one_line_or_in_nothing_and_loses_nothing(
    seed: int, hocket: Hocket, run: Path
) -> None:
    draw = random.Random(seed)
    name = draw.choice(names(run))
    damage = draw.choice([cut, flip, blank, retype])
    (run / name).write_bytes(damage((run / name).read_bytes(), draw))
    before = contents(run)
    for command in draw.sample(COMMANDS[1:], 2):
        ended = hocket(*command)
        check(ended, (seed, name, command))
        assert contents(run) == before, (seed, name, command)
    ended = hocket(*RESUME)
    check(ended, (seed, name, RESUME))
    after = contents(run)
    if ended.status:
        assert after == before
    elif name in ("run.json", "metrics.jsonl", "metrics.csv") and f"{name}.damaged-1" in after:
        assert after[f"{name}.damaged-1"] == before[name]
    if not name.startswith("metrics."):
        assert ended.status or steps(run) == ([*range(1, 10)],) * 2


def check(ended: Any, where: object) -> None:
    assert ended.status in (0, 2), (where, ended)
    told = [line for line in ended.err.splitlines() if not line.startswith("hocket: warning: ")]
    assert len(told) <= (3 if ended.status == 0 else 1), (where, ended.err)
    assert all(line.startswith("hocket: ") for line in told), (where, ended.err)


@pytest.mark.parametrize(
    ("key", "was", "now"),
    [("optimizer.lr", 0.1, 0.9), ("steps", 8, 9), ("batch_size", 32, 33)],
)
def test_a_configuration_that_was_changed_is_not_resumed_in_silence(
    key: str, was: object, now: object, hocket: Hocket, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    *places, last = key.split(".")
    node = config
    for place in places:
        node = node[place]
    assert node[last] == was
    node[last] = now
    (run / "config.yaml").write_text(yaml.safe_dump(config, explicit_end=True))
    before = contents(run)
    ended = hocket(*RESUME)
    assert (ended.status, ended.out) == (2, "")
    told = f"RUN/config.yaml was changed since the run wrote it: {key} was {was}, and is now {now}"
    assert ended.err.startswith(f"hocket: {told}. Restore the file, ")
    assert contents(run) == before
    assert hocket("compare", "RUN").status == 0
    assert caplog.messages == [told]
    node[last] = was
    (run / "config.yaml").write_text(yaml.safe_dump(config, explicit_end=True))
    assert hocket(*RESUME).status == 0


def test_what_a_resumed_run_changes_holds_for_the_next(hocket: Hocket, run: Path) -> None:
    for steps_ in ("steps=9", "steps=10"):
        assert hocket("resume", "RUN", steps_, "-q").status == 0
    assert hocket("resume", "RUN", "-q").status == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 10


def test_a_configuration_that_nothing_remembers_is_resumed_with_a_word(
    hocket: Hocket, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / ".hocket.json").unlink()
    assert hocket(*RESUME).status == 0
    assert hocket("resume", "RUN", "steps=10", "-q").status == 0
    assert caplog.messages == [
        "RUN/config.yaml may have been changed by hand, because .hocket.json has no record of its content. The "
        "run continues with it"
    ]
