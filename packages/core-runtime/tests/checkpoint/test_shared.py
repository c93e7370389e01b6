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
from hocket.checkpoint.shared import patiently, require_shared
from hocket.errors import CheckpointError, MissingFileError
from hocket.transport.threads import Threads

HOST = socket.gethostname()


def on_hosts(folders: list[Path]) -> list[str]:
    """Have ranks find out whether these are one folder, as ranks that are processes do; return what each is told."""

    def ask() -> str:
        peer = hocket.join()
        peer.threads = Threads(peer)  # of which no rank shares a process with others
        try:
            require_shared(peer, folders[peer.rank])
        except CheckpointError as error:
            return str(error)
        return ""

    return hocket.virtual(len(folders)).run(ask)


def test_a_shared_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert on_hosts([tmp_path / "there"] * 3) == [""] * 3
    assert on_hosts([tmp_path / "new" / "one"] * 3) == [""] * 3
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_folders_of_a_host_each_are_told_before_training(tmp_path: Path) -> None:
    own, other = tmp_path / "a", tmp_path / "b"
    own.mkdir()
    other.mkdir()
    told = on_hosts([own, own, other])
    assert (
        told
        == [
            f"what rank 0 writes into {own} on {HOST} is not seen by rank 2 in {other} on {HOST} (looked for 0.2 s): a "
            "folder for checkpoints lies on a disk that all ranks share"
        ]
        * 3
    )


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for told in on_hosts([tmp_path / "file" / "folder"] * 2):
        assert "Not a directory" in told or "File exists" in told


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
