"""Counts of a source tree that is small enough to count by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOLS))

from readability import double_names, readability, riddles  # noqa: E402 (found in `tools`)
from source_tree import SourceTree, circles  # noqa: E402

PEER = '''"""A module.

Two more lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.host.memory import Memory  # a comment

# Any comment.


class Peer:
    """A contract."""

    size: int
    _hidden: int

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self._memory = None

    @property
    def memory(self) -> Memory:
        """Its memory."""
        text = """Not
        a docstring"""
        return Memory(text)


class Request: ...


class Wrapper(Request): ...


class Traced(Wrapper, Peer):
    def trace(self) -> None: ...
'''

FILES = {
    "core/src/hocket/__init__.py": "",
    "core/src/hocket/peer.py": PEER,
    "core/src/hocket/host/__init__.py": "from hocket.host.memory import Memory\nfrom hocket.peer import Wrapper\n",
    "core/src/hocket/host/memory.py": """
def late():
    from hocket import peer, draws
class Memory:
    '''What is kept.'''
    def size(self):
        '''How much there is.'''
""",
    "core/src/hocket/draws.py": f"""
import numpy as np
from numpy import array as array, zeros
def long():
    told = None
    for told in ():
        told: int = 1
        untold = told == 1
{"    pass" + chr(10) * 35}    return told
def short():
{"    pass" + chr(10) * 38}    return None
""",
    "one/src/hocket_one/plugin.py": """
from hocket.host import Wrapper
import hocket.draws
class Mine(Wrapper): ...
class Request: ...
""",
}


@pytest.fixture
def source(tmp_path: Path) -> SourceTree:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return SourceTree(tmp_path, [Path("core/src"), Path("one/src")])


def test_modules_and_their_imports_late_ones_and_those_for_type_checkers_too(source: SourceTree) -> None:
    assert source.imports == {
        "hocket": set(),
        "hocket.draws": set(),
        "hocket.host": {"hocket.host.memory", "hocket.peer"},
        "hocket.host.memory": {"hocket.peer", "hocket.draws"},
        "hocket.peer": {"hocket.host.memory"},
        "hocket_one.plugin": {"hocket.host", "hocket.draws"},
    }
    assert source.everything_imported("hocket_one.plugin") == {
        "hocket.host.Wrapper",
        "hocket.draws",
    }


def test_circles_of_files_and_of_folders(source: SourceTree) -> None:
    assert circles(source.imports) == [["hocket.host.memory", "hocket.peer"]]
    assert circles(source.folders("hocket")) == [["hocket.host", "hocket.peer"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e", "a"}, "e": {"d"}, "f": {"f"}}) == [
        ["a", "b", "c"],
        ["d", "e"],
    ]


def test_lines_of_code_have_more_than_comments_and_docstrings(source: SourceTree) -> None:
    peer = source.modules["hocket.peer"]
    assert peer.num_lines == 41
    assert peer.num_lines_of_code == 19
    assert peer.num_lines_with("Any") == 3


def test_members_are_public_and_inherited_ones_count(source: SourceTree) -> None:
    assert source.members("Peer") == {"size", "rank", "memory"}
    assert source.members("Traced") == {"size", "rank", "memory", "trace"}
    assert source.members("Nothing") is None


def test_methods_are_those_that_dir_shows(source: SourceTree) -> None:
    assert source.methods("Traced") == {"memory", "trace"}
    assert source.methods("Nothing") is None


def test_names_that_are_imported_as_themselves_are_exports(source: SourceTree) -> None:
    assert source.exports("hocket.draws") == {"array"}
    assert source.exports("hocket.nothing") is None


def test_riddles_double_names_told_and_long_functions_are_found(source: SourceTree, tmp_path: Path) -> None:
    counts = readability(tmp_path, source)
    assert list(riddles(source.modules.values())) == [
        "core/src/hocket/host/memory.py:4 What is kept.",
        "core/src/hocket/host/memory.py:6 How much there is.",
    ]
    assert counts["riddles of classes"] == "1/2"
    assert counts["riddles of modules"] == "0/1"
    assert counts["riddles of functions"] == "1/2"
    assert double_names(source.modules.values()) == {
        "Request": ["core/src/hocket/peer.py:34", "one/src/hocket_one/plugin.py:5"]
    }
    assert counts["assignments to told"] == 3
    assert counts["functions over 40 lines"] == 1
    assert counts["methods of Session"] == counts["words of README.md"] == "-"


def test_subclasses_of_subclasses_count(source: SourceTree) -> None:
    assert source.subclasses("Request") == {
        "hocket.peer.Wrapper",
        "hocket.peer.Traced",
        "hocket_one.plugin.Mine",
    }


def test_the_command_prints_a_column_for_each_side() -> None:
    command = [sys.executable, str(TOOLS / "count"), ".", "HEAD"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    title, *rows = ended.stdout.splitlines()
    assert title.split() == [".", "HEAD"]
    counts = {row[:26].strip(): row[26:].split() for row in rows}
    assert {"files", "classes", "members of Peer", "lines with Any", "riddles of classes"} <= set(counts)
    assert all(len(each) == 2 for each in counts.values())
    assert int(counts["files"][0]) > 100
