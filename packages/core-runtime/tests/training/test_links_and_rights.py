"""Folders of others and links: a run's folder may lead elsewhere, and what cannot be used is one line with its path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import CheckpointError, WriteError

Hocket = Callable[..., Any]

RUN = ("run", "sgd", "-n", "1", "--transport", "virtual", "checkpoint.every=2", "-q")


@pytest.fixture(autouse=True)
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def as_another_user(folder: Path) -> Iterator[None]:
    """Give up the right to read a folder, which root has whatever its mode is."""
    before = folder.stat().st_mode
    folder.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        folder.chmod(before)


def test_checkpoints_may_lie_on_another_disk(hocket: Hocket, within: Path) -> None:
    (within / "disk").mkdir()
    (within / "RUN").mkdir()
    (within / "RUN" / "checkpoints").symlink_to(within / "disk")
    assert hocket(*RUN, "steps=4", "--out", "RUN").status == 0
    assert hocket("resume", "RUN", "steps=6", "-q").status == 0
    assert hocket(*RUN, "steps=2", "--out", "RUN", "--overwrite").status == 0
    assert (within / "RUN" / "checkpoints").is_symlink()
    assert [path.name for path in (within / "disk").iterdir()] == ["step-00000002"]
    (within / "disk").rename(within / "unmounted")
    ended = hocket("resume", "RUN", "steps=6", "-q")
    assert (ended.status, ended.err) == (
        2,
        f"hocket: RUN/checkpoints is a link to {within}/disk, which does not exist: is its disk mounted?\n",
    )


@pytest.mark.parametrize(
    ("link", "out", "expected"),
    [
        ("RUN/checkpoints", "RUN", "--out RUN holds checkpoints (a link to /nowhere/x, which is not there), which "),
        ("RUN/config.yaml", "RUN", "--out RUN holds config.yaml (a link to /nowhere/x, which is not there), which "),
        ("RUN", "RUN", "--out RUN cannot be written, because RUN is a link to /nowhere/x, which is not there"),
        ("runs", "", ""),
    ],
)  # fmt: skip
def test_a_link_that_leads_nowhere_is_named(
    link: str, out: str, expected: str, hocket: Hocket, within: Path
) -> None:
    (within / link).parent.mkdir(exist_ok=True)
    (within / link).symlink_to("/nowhere/x")
    ended = hocket(*RUN, "steps=1", *(["--out", out] if out else []))
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith(f"hocket: {expected}")
    assert "a link to /nowhere/x, which is not there" in ended.err


def test_what_a_script_opens_or_saves_is_named_too(within: Path) -> None:
    (within / "log").symlink_to("/nowhere/x")

    def train() -> None:
        model = nn.Linear(1, 1)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            with pytest.raises(
                WriteError, match=r"^log cannot be written: it is a link to /nowhere/x, which"
            ):
                session.open_log("log")
            with pytest.raises(
                CheckpointError, match=r"^log: it is a link to /nowhere/x, which is not there$"
            ):
                session.save("log")

    hocket.virtual(1).run(train)


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "RUN"),
        ("compare", "."),
        ("resume", "RUN", "-q"),
        (*RUN, "steps=1", "--out", "RUN"),
        (*RUN, "steps=1", "--out", "RUN/within"),
    ],
    ids=" ".join,
)
def test_a_folder_that_may_not_be_read_is_one_line(
    command: tuple[str, ...], hocket: Hocket, within: Path
) -> None:
    for name in ("RUN", "RUN-2"):
        assert hocket(*RUN, "steps=2", "--out", name).status == 0
    hocket(*command)  # imports what it needs
    for folder in (within, *within.parents[:2]):
        folder.chmod(0o755)
    with as_another_user(within / "RUN"):
        ended = hocket(*command)
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("hocket: ")
    assert "RUN" in ended.err
    assert "Permission denied" in ended.err or "another user" in ended.err
