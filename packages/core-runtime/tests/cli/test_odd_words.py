"""Odd words on the command line: each is answered by one line and status 2, and takes nothing away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hocket.cli.folders import named_folder
from hocket.cli.main import main
from hocket.own_files import NOTE, claim
from hocket.training.run import load_run

LONG = "x" * 300


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with things in it that are not what they are taken for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("somebody's")
    (tmp_path / "file.png").write_text("somebody's")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "leaving.py").write_text("def model():\n    raise SystemExit(3)\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('on purpose')\n")
    (tmp_path / "octal.yaml").write_text("recipe: sgd\nsteps: 010\n")
    (tmp_path / "minutes.yaml").write_text("recipe: sgd\nsteps: 1:30\n")
    return tmp_path


def said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `hocket`, and return what it says; its status is 2."""
    monkeypatch.setattr(sys, "argv", ["hocket", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capfd.readouterr().err


DRY = ("run", "sgd", "--dry-run", "-n", "2")
PRICED = ("--hosts", "4x1", "--step", "100ms")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*DRY, "--out", LONG), "File name too long: name another folder"),
        (("resume", LONG), "File name too long: name another folder"),
        (("compare", LONG), "File name too long: name another folder"),
        (("sweep", "sgd", "seed=0,1", "--out", LONG), "File name too long: name another folder"),
        ((*DRY, "--out", "file/x"), "--out file/x cannot be written, because file is no folder"),
        (
            (*DRY, "--out", "nowhere"),
            "--out nowhere cannot be written, because nowhere is a link to gone, which is not there",
        ),
        (("recommend", LONG, *PRICED), "there is no recipe"),
        (("launch", "-n", "2", f"{LONG}.py"), "there is no file"),
        (("plan", LONG), "there is no recipe"),
        (("recommend", "--params", "1e400", *PRICED), "--params: got '1e400'; allowed"),
        (("recommend", "--params", "9" * 500, *PRICED), "...; allowed: a number such as 25M"),
        (("plan", "sgd", "--bandwidth", "1e400gbit"), "--bandwidth: got '1e400gbit'; allowed"),
        (("plan", "sgd", "--latency", "1e400s"), "--latency: got '1e400s'; allowed"),
        (("plan", "sgd", "--hosts", "binary"), "hostfile binary cannot be read: not UTF-8 text"),
        (("plan", "sgd", "--hosts", "a:" + "9" * 5000), "is not a host"),
        (("plan", "sgd", "--hosts", LONG), "is not a host"),
        ((*DRY, "--mpi-arg", "'x"), "--mpi-arg 'x: No closing quotation"),
        (("recommend", "--model", "leaves:model", *PRICED), "it ends the process, with sys.exit(3)"),
        (("recommend", "--model", "leaving:model", *PRICED), "it ends the process, with sys.exit(3)"),
        ((*DRY, "task=leaves:Task"), "it ends the process, with sys.exit(3)"),
        ((*DRY, "optimizer=leaves:Mine"), "it ends the process, with sys.exit(3)"),
        ((*DRY, "optimizer=raises:Mine"), "RuntimeError: on purpose"),
        (("run", "octal.yaml", "--dry-run"), "YAML reads 010 as 8: write 8"),
        (("run", "minutes.yaml", "--dry-run"), "YAML reads 1:30 as 90: write 90"),
        ((*DRY, "steps=010"), "YAML reads 010 as 8"),
        ((*DRY, 'name="a\\nb"'), "printable characters on one line"),
    ],
)
def test_one_line(
    words: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sorted(Path().iterdir())
    assert expected in said(monkeypatch, capfd, *words)
    assert [path for path in sorted(Path().iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("mine.nope", "Format 'nope' is not supported"),
        ("file.png", "file.png exists, but is not a picture by Hocket"),
        ("", "is empty"),
    ],
)
def test_pictures(
    picture: str, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    words = ("plan", "dpsgd", "-n", "4", "--analysis", "--picture", picture)
    assert expected in said(monkeypatch, capfd, *words)
    assert Path("file.png").read_text() == "somebody's"


def test_a_picture_of_its_own_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for ending in ("png", "svg", "pdf"):
        picture = Path(f"own.{ending}")
        monkeypatch.setattr(
            sys, "argv", ["hocket", "plan", "dpsgd", "-n", "4", "--analysis", "--picture", str(picture)]
        )
        for _ in range(2):
            main()
        assert b"Hocket" in picture.read_bytes()


def test_a_pipe_that_nobody_writes_is_not_waited_for(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import os

    os.mkfifo(in_folder / "pipe.yaml")
    assert "pipe.yaml: cannot read the file: it is not a regular file" in said(
        monkeypatch, capfd, "run", "pipe.yaml", "--dry-run"
    )


def test_the_folder_of_a_run_lies_below_runs_whatever_its_name() -> None:
    for name in ("a/../../b", "x" * 3000, "日" * 3000):
        run = load_run({"recipe": "sgd", "name": name})
        with named_folder(None, run, make=True) as folder:
            assert folder.resolve().parent == Path("runs").resolve()


def test_somebodys_file_with_the_name_of_a_note_stays(in_folder: Path) -> None:
    (in_folder / NOTE).write_text("somebody's")
    claim(in_folder, "metrics.jsonl")
    assert (in_folder / f"{NOTE}.damaged-1").read_text() == "somebody's"
