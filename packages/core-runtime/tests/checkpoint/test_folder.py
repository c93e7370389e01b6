"""Which directories count, in which order, and which are removed."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from training import Training, on_ranks

from hocket.checkpoint import folder as folders
from hocket.checkpoint import shared
from hocket.checkpoint.manifest import Manifest
from hocket.disk import sync_folder
from hocket.errors import CheckpointError

TRAINING = Training(("local",), samples=(18, 18), epochs=2)


def names(folder: Path) -> list[str]:
    return [path.name for path in folders.complete(folder)]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    on_ranks(1, Training(("local",), epochs=2, options={"keep": 2}), save=(tmp_path, [1, 3, 4, 9, 10]))
    assert names(tmp_path) == ["step-00000009", "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)


def test_nothing_is_removed_unasked(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir()
    on_ranks(1, TRAINING, save=(tmp_path, [1, 2, 3]))
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert (tmp_path / "step-notes").is_dir()


def test_a_step_that_is_saved_again_overwrites_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        on_ranks(1, TRAINING, save=(tmp_path, [2]), stop=2)
    assert names(tmp_path) == ["step-00000002", "step-00000002.1"]
    assert folders.newest_first(tmp_path)[0].name == "step-00000002.1"


def test_a_step_that_is_saved_again_and_again(tmp_path: Path) -> None:
    for _ in range(4):
        on_ranks(1, Training(("local",), options={"keep": 1}), save=(tmp_path, [2]), stop=2)
    assert names(tmp_path) == ["step-00000002.3"]


@pytest.mark.parametrize(
    "files",
    [
        ["lit_model.pth"],
        [],
        ["rank-0000.safetensors", "notes.txt"],
        ["rank-0000.safetensors", "manifest.json", "tokenizer.json"],
    ],
)
@pytest.mark.parametrize("name", ["step-00000001", "step-00000004", "step-00000004.7"])
def test_what_others_have_written_stays(files: list[str], name: str, tmp_path: Path) -> None:
    """Others call their directories so, too; and some keep files of their own in a checkpoint."""
    (tmp_path / name).mkdir()
    for file in files:
        (tmp_path / name / file).write_text("weeks of work")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000002").symlink_to("elsewhere")
    on_ranks(1, Training(("local",), epochs=2, options={"keep": 1}), save=(tmp_path, [4, 5, 6]), stop=6)
    assert [(tmp_path / name / file).read_text() for file in files] == ["weeks of work"] * len(files)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [name, "elsewhere", "step-00000002", "step-00000006"]
    )


def test_what_a_save_that_fails_has_written_goes_at_once(tmp_path: Path) -> None:
    on_ranks(1, TRAINING, save=(tmp_path, [2]), stop=2)

    def fail() -> None:
        with folders.begin(tmp_path, 3, "a") as path:
            (path / "rank-0000.safetensors.hocket-tmp").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_file_system_that_syncs_no_folder() -> None:
    folder = Path("/proc")  # which answers EINVAL
    if not folder.is_dir():
        pytest.skip("needs a file system that syncs no folder")
    sync_folder(folder)


def test_the_newest_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        with folders.begin(tmp_path, step, "a") as path:
            (path / "manifest.json").touch()
            folders.finish(path)
    assert folders.newest_first(tmp_path)[0].name == "step-100000000"


def test_a_later_step_is_of_another_run(tmp_path: Path) -> None:
    on_ranks(2, TRAINING, save=(tmp_path, [9]), stop=9)
    with pytest.raises(
        CheckpointError, match=r"holds step-00000009, which is later than step 4: .* another folder"
    ):
        on_ranks(2, TRAINING, save=(tmp_path, [4]))
    assert names(tmp_path) == ["step-00000009"]


def test_what_was_cut_off_is_left_out_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(2, TRAINING, save=(tmp_path, [3, 5]), stop=5)
    (tmp_path / "step-00000005" / "manifest.json").unlink()
    [result, _] = on_ranks(2, TRAINING, load=tmp_path, stop=4)
    assert result.resumed is not None
    assert result.resumed.step == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'step-00000005'} is incomplete, because a save or a copy was interrupted: it is skipped"
    ]
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005-of_a_save.unfinished")
    on_ranks(2, TRAINING, load=tmp_path, save=(tmp_path, [4]), stop=4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert not (tmp_path / "step-00000005-of_a_save.unfinished").exists()


def test_a_manifest_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LATE_S", 20.0)
    on_ranks(2, TRAINING, save=(tmp_path, [3, 5]), stop=5)
    manifest, away = tmp_path / "step-00000005" / "manifest.json", tmp_path / "away"
    manifest.rename(away)
    come = threading.Timer(0.3, lambda: away.rename(manifest))
    come.start()
    [result, _] = on_ranks(2, TRAINING, load=tmp_path, stop=5)
    come.join()
    assert result.resumed is not None
    assert result.resumed.step == 5


def test_a_checkpoint_whose_manifest_comes_too_late_is_not_removed(tmp_path: Path) -> None:
    on_ranks(2, TRAINING, save=(tmp_path, [3, 5]), stop=5)
    manifest, away = tmp_path / "step-00000005" / "manifest.json", tmp_path / "away"
    manifest.rename(away)
    on_ranks(2, TRAINING, load=tmp_path, save=(tmp_path, [4, 5]), stop=5)
    away.rename(manifest)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005", "step-00000005.1"]
    assert all(Manifest.read(path).step == 5 for path in tmp_path.glob("step-00000005*"))


def test_a_folder_that_cannot_be_synchronised_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        sync_folder(tmp_path)
    assert caught.value.filename == str(tmp_path)
