"""Output where a terminal takes no more than ASCII: commands go through, and every character has a stand-in."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest

from hocket.cli.main import main
from hocket.cli.streams import keep_streams
from hocket.cli.table import show_table


@contextlib.contextmanager
def terminal() -> Iterator[io.TextIOWrapper]:
    """Standard output that takes ASCII alone."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream):
        yield stream
        stream.flush()


def test_every_character_has_a_stand_in() -> None:
    with terminal() as stream:
        keep_streams()
        print("1 ± 2 µs, größe, φ, \udcff")
    assert isinstance(stream.buffer, io.BytesIO)
    assert stream.buffer.getvalue() == b"1 +- 2 us, gr\\xf6\\xdfe, \\u03c6, \\udcff\n"


def test_every_command_prints_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hocket", "plan", "--help"])
    with terminal() as stream, contextlib.suppress(SystemExit):
        main()
        print("±")
    assert stream.errors == "hocket"


def test_a_table_that_does_not_fit_is_turned(capsys: pytest.CaptureFixture[str]) -> None:
    headers, row = ("exchange", "collective", "every", "sent"), ("parameters.0", "a" * 20, "step", "1 MB")
    show_table(headers, [row], width=40, drawn=False)
    expected = [f"{header:<10}  {cell}" for header, cell in zip(headers, row, strict=True)]
    assert capsys.readouterr().out.splitlines() == expected
    # Turning helps no table of many rows.
    show_table(headers, [row] * 9, width=40, drawn=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == ["exchange", *["parameters.0"] * 9] * 2
