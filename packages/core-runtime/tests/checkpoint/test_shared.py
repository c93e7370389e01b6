"""Disks that ranks do not share, or that show late what another host has written."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch

import hocket
from hocket.checkpoint import shared
from hocket.checkpoint.shared import leaders_of, patiently
from hocket.errors import CheckpointError, MissingFileError

HOST = socket.gethostname()


def leaders(folders: list[Path]) -> list[int]:
    """Have ranks with a folder each find out which of them share one; return for each the first that has its own."""

    def ask() -> list[int]:
        peer = hocket.join()
        return leaders_of(peer, folders[peer.rank])

    first, *others = hocket.virtual(len(folders)).run(ask)
    assert all(other == first for other in others)
    return first


def test_a_shared_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert leaders([tmp_path / "there"] * 3) == [0, 0, 0]
    assert leaders([tmp_path / "new" / "one"] * 3) == [0, 0, 0]
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("aab", [0, 0, 2]), ("abb", [0, 1, 1]), ("abcb", [0, 1, 2, 1]), ("aba", [0, 1, 0]), ("abc", [0, 1, 2])],
)
def test_folders_of_hosts_each_are_told_apart(
    order: str, expected: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").mkdir()
    assert leaders([tmp_path / name for name in order]) == expected
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    [said] = caplog.messages
    assert said.startswith(f"{tmp_path / 'a'} on {HOST} is not visible to rank")
    assert said.endswith(
        f" on {HOST}, so each host keeps the files of its own ranks; session.load fetches missing files from "
        "other hosts"
    )


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        leaders([tmp_path / "file" / "folder"] * 2)
    with pytest.raises(CheckpointError, match=r"rank 1: .*(Not a directory|File exists)"):
        leaders([tmp_path / "there", tmp_path / "file" / "folder"])


def test_what_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LATE_S", 10.0)
    late = threading.Timer(0.5, (tmp_path / "file").touch)

    def look() -> str:
        if not (tmp_path / "file").exists():
            raise MissingFileError("no file")
        return "there"

    late.start()
    begun_s = time.monotonic()
    assert patiently(look) == "there"
    assert time.monotonic() - begun_s < 5


def test_a_rank_whose_file_comes_late_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(what: str) -> list[float]:
        model = torch.nn.Linear(3, 1)
        with hocket.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd", initial="keep"
        ) as session:
            getattr(session, what)(tmp_path)
        return model.weight.flatten().tolist()

    saved = hocket.virtual(2).run(train, "save")
    monkeypatch.setattr(shared, "LATE_S", 10.0)
    [file] = tmp_path.glob("step-*/rank-0001.safetensors")
    hidden = file.rename(tmp_path / "hidden")
    late = threading.Timer(0.7, lambda: hidden.rename(file))
    late.start()
    assert hocket.virtual(2).run(train, "load") == saved
    late.join()


def test_what_does_not_come_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=rf"no file \(looked for 0.2 s on {HOST}\)"):
        patiently(lambda: (_ for _ in ()).throw(MissingFileError("no file")))
