"""Whenever a save is cut off, the last complete checkpoint is found and loads, and the next save cleans up.

Every operation on files that a save makes (each open for writing, rename, mkdir and removal) is, in turn, the last one
that happens: from there on, each fails. CI has every third, others for each test. The process itself is killed in
`test_mpi` and `test_killed_beside`.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from training import Result, Training, on_ranks

import hocket
from hocket.checkpoint import folder as folders
from hocket.errors import CheckpointError

RANKS = 2
EVERY = 1 if os.environ.get("HOCKET_CELLS") == "all" else 3
TRAINING = Training(("dpsgd",), epochs=2)


_CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


class Killed(BaseException):
    """The process is gone; no handler of errors runs in one that is, so none may catch this."""


class Disk:
    """Counts the operations on files below a folder, and lets none happen after a number of them."""

    def __init__(self) -> None:
        self.folder = ""
        self.left: int | None = None
        self.seen: list[str] = []
        self._error: Callable[[str], BaseException] = Killed
        self._lock = threading.Lock()  # saves beside training have a thread of each rank
        sys.addaudithook(self._heard)  # which cannot be taken off again

    def _heard(self, event: str, details: tuple[Any, ...]) -> None:
        if self.left is None or event not in _CHANGES or (event == "open" and not details[2] & os.O_CREAT):
            return
        path = Path(str(details[0]))
        if event in ("os.remove", "os.rmdir") and details[1] >= 0:  # as `shutil.rmtree` names what it removes
            path = Path(f"/proc/self/fd/{details[1]}").resolve() / path
        if self.folder not in str(path):
            return
        with self._lock:
            if self.left == 0:
                raise self._error(f"killed at {event}")
            self.left -= 1
            self.seen.append(f"{event} {path.name}")

    @contextmanager
    def dies_after(
        self, count: int, folder: Path, error: Callable[[str], BaseException] = Killed
    ) -> Iterator[None]:
        self.folder, self.left, self.seen, self._error = str(folder), count, [], error
        try:
            yield
        finally:
            self.left = None


_DISK = Disk()


def a_rank_is_killed() -> AbstractContextManager[object]:
    """Expect the end of a rank; beside training, another rank that hears of it may be the first to end."""
    return pytest.raises((Killed, CheckpointError), match="killed at")


def places(first: int, end: int, offset: int) -> range:
    """Return the numbers of the operations that are the last ones."""
    return range(first + offset % EVERY, end, EVERY)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_kill_at_any_operation(blocking: bool, tmp_path: Path) -> None:
    saving = Training(TRAINING.strategy, options={"keep": 1, "blocking": blocking})
    expected = [r.bits() for r in on_ranks(RANKS, TRAINING)]
    with _DISK.dies_after(10**9, tmp_path / "whole"):
        on_ranks(RANKS, saving, save=(tmp_path / "whole", [3, 6]), stop=6)
        [_, first] = (i for i, seen in enumerate(_DISK.seen) if seen == "open .hocket-lock")
        operations = _DISK.seen[first:]
    # Both ranks' files and the manifest: written and renamed; then their directory; then the older checkpoint goes.
    renamed = [seen for seen in operations if seen.startswith("os.rename")]
    unfinished = [f"os.rename rank-{rank:04d}.safetensors.hocket-tmp" for rank in range(RANKS)]
    assert sorted(renamed[:2]) == unfinished
    assert renamed[2] == "os.rename manifest.json.hocket-tmp"
    assert [seen.rpartition("-")[0] for seen in renamed[3:]] == ["os.rename step-00000006", "os.rename step"]
    assert operations[-1] == "os.remove .hocket-lock"
    assert len(operations) > 12
    found = set()
    for count in places(first, first + len(operations), blocking):
        folder = tmp_path / f"cut after {count}"
        with a_rank_is_killed(), _DISK.dies_after(count, folder):
            on_ranks(RANKS, saving, save=(folder, [3, 6]), stop=6)
        step = int(folders.newest_first(folder)[0].name.partition("-")[2])
        found.add(step)
        resumed = on_ranks(RANKS, TRAINING, load=folder, save=(folder, [7]))
        assert [r.bits() for r in resumed] == expected
        assert [r.resumed.step for r in resumed if r.resumed is not None] == [step, step]
        assert not folders.incomplete(folder)
        assert folders.newest_first(folder)[0].name == "step-00000007"
        assert [path.name for path in folder.iterdir() if path not in folders.complete(folder)] == []
        assert not list(folder.rglob("*.hocket-tmp"))
    assert found == {3, 6}


@pytest.mark.parametrize("code", [pytest.param(errno.EROFS, marks=pytest.mark.full), errno.ENOSPC])
def test_a_disk_that_takes_nothing_more_from_any_operation_on(code: int, tmp_path: Path) -> None:
    """Beside training: all ranks get an error, and what was complete is whole when the disk is mended."""
    saving = Training(TRAINING.strategy, options={"keep": 1, "blocking": False})
    expected = [r.bits() for r in on_ranks(RANKS, TRAINING)]
    with _DISK.dies_after(10**9, tmp_path / "whole"):
        on_ranks(RANKS, saving, save=(tmp_path / "whole", [3, 6]), stop=6)
        [_, first] = (i for i, seen in enumerate(_DISK.seen) if seen == "open .hocket-lock")
        count = len(_DISK.seen)

    def full(_: str) -> OSError:
        return OSError(code, os.strerror(code))

    for place in places(first, count, 2):
        folder = tmp_path / f"from {place} on"
        with pytest.raises(CheckpointError, match=os.strerror(code)), _DISK.dies_after(place, folder, full):
            on_ranks(RANKS, saving, save=(folder, [3, 6]), stop=6)
        resumed = on_ranks(RANKS, TRAINING, load=folder, save=(folder, [7]))
        assert [r.bits() for r in resumed] == expected
        assert not folders.incomplete(folder)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_kill_where_each_rank_has_a_disk_of_its_own(blocking: bool, tmp_path: Path) -> None:
    saving = Training(TRAINING.strategy, options={"keep": 1, "blocking": blocking})
    expected = [r.bits() for r in on_ranks(RANKS, TRAINING)]

    def run(
        folder: Path, training: Training, steps: list[int], stop: int | None, *, loads: bool
    ) -> list[Result]:
        def on_rank() -> Result:
            own = folder / str(hocket.join().rank)
            return training(int(own.name), save=(own, steps), stop=stop, load=own if loads else None)

        return hocket.virtual(RANKS).run(on_rank)

    with _DISK.dies_after(10**9, tmp_path / "whole"):
        run(tmp_path / "whole", saving, [3, 6], 6, loads=False)
        locks = [i for i, seen in enumerate(_DISK.seen) if seen == "open .hocket-lock"]
        first, count = locks[RANKS], len(_DISK.seen)
    for place in places(first, count, 2 * blocking):
        folder = tmp_path / f"cut after {place}"
        with a_rank_is_killed(), _DISK.dies_after(place, folder):
            run(folder, saving, [3, 6], 6, loads=False)
        resumed = run(folder, TRAINING, [7], None, loads=True)
        assert [r.bits() for r in resumed] == expected, place
        for rank in range(RANKS):
            assert not folders.incomplete(folder / str(rank))
