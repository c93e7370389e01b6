"""`hocket plan --analysis`: the table, the picture, and what cannot be analysed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.installing import how_to_install

PNG = b"\x89PNG"


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hocket", "plan", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_table_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "ring.png"
    assert plan(monkeypatch, "dpsgd", "-n", "8", "--analysis", "--picture", str(picture)) == 0
    lines = capsys.readouterr().out.splitlines()
    # Of a ring of 8, 1/3 + 2/3 cos 45 degrees to the k; the exponential graph has averaged after three rounds.
    for expected in (["k", "ring", "exponential"], ["2", "0.648", "0.653"], ["3", "0.521", "0"]):
        assert expected in [line.split() for line in lines]
    assert lines[-1] == f"picture: {picture}"
    assert picture.read_bytes().startswith(PNG)


def test_several_exchanges_have_a_picture_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    second = "parameters=[{collective: gossip, topology: ring, every: 2}, {collective: gossip, topology: exponential}]"
    picture = str(tmp_path / "mixing.png")
    assert (
        plan(monkeypatch, "dpsgd", second, "--analysis", "--compare", "random_matching", "--picture", picture)
        == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mixing-parameters.0.png",
        "mixing-parameters.1.png",
    ]


def test_without_matplotlib_there_is_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "none.png"
    assert plan(monkeypatch, "dpsgd", "--analysis", "--picture", str(picture)) == 0
    assert capsys.readouterr().out.endswith(f"no picture: {how_to_install('hocket-core', 'plot')}\n")
    assert not picture.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sgd"], "--analysis needs an exchange with a topology, and this strategy has none"),
        (["dpsgd", "--compare", "rign"], "--compare rign: there is no topology 'rign'. Did you mean 'ring'? There "),
        (["dpsgd", "--compare", "{name: ring, x: 1}"], "--compare {name: ring, x: 1}: x: unknown key"),
        (["dpsgd", "--compare", "{"], "--compare { is not YAML: give a topology's name"),
        (["dpsgd", "--picture", "no/such/folder/x.png"], "--picture no/such/folder/x.png cannot be written"),
    ],
)  # fmt: skip
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert plan(monkeypatch, *arguments, "--analysis") == 2
    assert capsys.readouterr().err.startswith(f"hocket: {expected}")
