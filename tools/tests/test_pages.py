"""The pages about the house: short, and each file and name that they give in `code` is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = REPOSITORY / "packages/core-runtime/src/hocket"
ARCHITECTURE = REPOSITORY / "docs/architecture.md"
FOLDERS = [*sorted(CORE.rglob("README.md")), REPOSITORY / "integration-tests/README.md"]
MOST_WORDS, MOST_LINES = 3000, 40


@cache
def words_of_sources() -> frozenset[str]:
    kinds = ("*.py", "*.yaml", "*.md", "*.toml")
    files = [
        path for kind in kinds for path in REPOSITORY.glob(f"packages/*/src/**/{kind}") if path not in FOLDERS
    ]
    files += [*REPOSITORY.glob("integration-tests/*.py"), *REPOSITORY.glob("tools/*"), *CORE.glob("*.py")]
    texts = [path.read_text(errors="replace") for path in files if path.is_file()]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def missing(page: Path, text: str) -> Iterator[str]:
    """Yield what a page gives in `code` and is neither a file of the repository nor made of the sources' words."""
    folder = CORE if page == ARCHITECTURE else page.parent
    for each in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if re.fullmatch(r"[\w./*-]+(\.(py|md)|/)", each):
            roots = (folder, CORE, CORE.parent, CORE.parents[1], REPOSITORY)
            found = any(any(root.glob(each.rstrip("/"))) for root in roots)
            if not found and ("/" in each or not any(folder.rglob(each))):
                yield each
        else:
            yield from (
                word for word in re.findall(r"[A-Za-z_]\w\w+", each) if word not in words_of_sources()
            )


@pytest.mark.parametrize("page", [ARCHITECTURE, *FOLDERS], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert list(missing(page, page.read_text())) == []


def test_what_is_not_there_is_found() -> None:
    text = "`no_such.py` `session/replica_session.py` `Sesssion.close` `Session.close` `nofolder/`"
    assert list(missing(ARCHITECTURE, text)) == ["no_such.py", "Sesssion", "nofolder/"]


def test_pages_are_short() -> None:
    assert len(ARCHITECTURE.read_text().split()) <= MOST_WORDS
    assert [page for page in FOLDERS if len(page.read_text().splitlines()) > MOST_LINES] == []
