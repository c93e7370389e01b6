"""The documentation as a site: it builds without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder; links to pages and headings that are not there would have failed."""
    out = tmp_path_factory.mktemp("site")
    command = [str(REPOSITORY / "tools" / "site"), str(out)]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def test_every_page_of_the_repository_is_in_it(site: Path) -> None:
    pages = [
        page for pattern in ("*.md", "docs/*.md", "packages/*/*.md") for page in REPOSITORY.glob(pattern)
    ]
    missing = [
        page for page in pages if not (site / page.relative_to(REPOSITORY)).with_suffix(".html").exists()
    ]
    assert not missing
    assert "docs/index.html" in (site / "index.html").read_text()
