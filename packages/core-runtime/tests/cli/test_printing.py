"""Output where a terminal takes no more than ASCII: commands go through, and every character has a stand-in."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest

from hocket.cli.main import main
from hocket.cli.streams import keep_streams


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
