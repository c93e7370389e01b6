"""The list of `tools/test --quick`: it names files that exist, and leaves no folder out but those of jobs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "packages/core-runtime/tests"
#: Folders whose tests start jobs, a few seconds of processor time for each rank.
OF_JOBS = {CORE / "endings", CORE / "launched"}


def listed() -> list[Path]:
    lines = (ROOT / "tools/quick_tests.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return [ROOT / folder / file for folder, *files in rows for file in files]


def folders_with_tests() -> set[Path]:
    """Return the folders of core's tests by their part, and those of all other tests."""
    parts = {path.parent for path in CORE.glob("*/test_*.py")}
    others = {path.parent for path in ROOT.glob("packages/*/tests/test_*.py")} - {CORE}
    return (parts - OF_JOBS) | others | {ROOT / "integration-tests", ROOT / "tools/tests"}


def test_every_file_is_there_once() -> None:
    files = listed()
    assert [file for file in files if not file.is_file()] == []
    assert len(files) == len(set(files))


def test_no_folder_is_left_out() -> None:
    assert folders_with_tests() - {file.parent for file in listed()} == set()
