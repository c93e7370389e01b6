"""Docstrings that are understood the first time: they begin with a noun or a verb, and their sentences are short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"

RIDDLE = re.compile(r"(What|How|Who|Whom|Whose|Which|Whether|Where|When|That|Those|Of|As|In which|In what)\b")
MOST_WORDS = 20
MESSENGER = re.compile(r"(^|_)told(_|$)")


def faults(source: str) -> Iterator[str]:
    """Yield a line for each docstring that breaks the rule, and for each name with `told` in it."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            # An example or a list may follow the first sentence, so a paragraph ends it as well.
            first = re.split(r"(?<!e\.g)(?<!i\.e)\.(?=\s|$)|\n\n", text, maxsplit=1)[0]
            if RIDDLE.match(text):
                yield f"{line}: begins with a riddle: {text.splitlines()[0]}"
            if len(first.split()) > MOST_WORDS:
                yield f"{line}: {len(first.split())} words to the first full stop: {text.splitlines()[0]}"
        for name in _names(node):
            if MESSENGER.search(name):
                yield f"{line}: {name} says nothing about what it holds"


def _names(node: ast.AST) -> Iterator[str]:
    for field in ("id", "arg", "attr", "name", "asname"):
        if isinstance(name := getattr(node, field, None), str):
            yield name


def test_docstrings_begin_with_their_subject_and_are_short() -> None:
    sources = sorted(PACKAGES.glob("*/src/**/*.py"))
    found = [
        f"{path.relative_to(PACKAGES)}:{fault}" for path in sources for fault in faults(path.read_text())
    ]
    assert sources
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What ranks hold."""',
        'class Undo:\n    """That takes a copy."""',
        'def size() -> int:\n    """How many ranks there are."""',
        f'"""{"word " * 21}"""',
        "for told in ():\n    pass",
        "def warn(told: str) -> None: ...",
        "self._times_told = 1",
        "import os as told",
    ],
)
def test_a_riddle_a_long_sentence_and_told_are_found(source: str) -> None:
    assert len(list(faults(source))) == 1


def test_a_noun_a_verb_and_an_abbreviation_pass() -> None:
    source = '"""The ranks.\n\nWhat they hold."""\ndef size() -> int:\n    """Return a size, e.g. 2."""\n    retold = 2'
    assert not list(faults(source))
