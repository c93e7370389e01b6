"""The documentation as a site: it builds without a warning, and lacks nothing that is public."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

from hocket.plugin import KNOWN_WORDS, default_registry

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/*.md", "packages/*/*.md", "packages/*/src/**/README.md", "integration-tests/*.md")
sys.path.insert(0, str(REPOSITORY / "tools"))

from browser import BROWSERS, Browser  # noqa: E402 (beside this file)
from site_in_browser import CUT, FOUND  # noqa: E402

import site_pages  # noqa: E402 (found in `tools`)

pytestmark = pytest.mark.timeout(400)


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
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def test_every_page_of_the_repository_is_in_it(site: Path) -> None:
    pages = [page for pattern in PAGES for page in REPOSITORY.glob(pattern)]
    missing = [
        page for page in pages if not (site / page.relative_to(REPOSITORY)).with_suffix(".html").exists()
    ]
    assert not missing
    assert "docs/index.html" in (site / "index.html").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if Browser.found is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    with Browser() as browser:
        yield browser


#: A screen and a phone, and in a full run a window beside an editor.
WIDTHS = (1280, 760, 390) if os.environ.get("HOCKET_CELLS") == "all" else (1280, 390)


def test_nothing_is_cut(site: Path, browser: Browser) -> None:
    # The first page leads on to docs/index.html.
    pages = sorted({*site.rglob("*.html")} - {*(site / "_static").rglob("*"), site / "index.html"})
    cut = []
    for page in pages:
        browser.resize(WIDTHS[0])
        browser.open(page)
        for width in WIDTHS:
            browser.resize(width)
            cut += [f"{page.relative_to(site)} at {width}: {line}" for line in browser.evaluate(CUT)]
    assert len(pages) > 50
    assert not cut, "\n".join(cut)


def test_what_is_too_wide_is_found(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "wide.html"
    texts = {
        "<pre style='overflow: hidden'>" + "wide " * 500 + "</pre>": "cut code",
        "<table><tr><td>" + "w" * 5000 + "</td></tr></table>": "the table is cut",
        "<p style='width: 3000px'>wide</p>": "beyond the page's edge",
    }
    browser.resize(390)
    for text, what in texts.items():
        page.write_text(f"<article style='overflow: hidden'>{text}</article>")
        browser.open(page)
        assert what in "\n".join(browser.evaluate(CUT))
    page.write_text(f"<article><pre style='overflow: auto'>{'wide ' * 500}</pre></article>")
    browser.open(page)
    assert browser.evaluate(CUT) == []


@pytest.mark.parametrize(
    ("words", "pages"),
    [
        ("huggingface", {"docs/works_with.html", "packages/transformers/README.html"}),
        ("lora", {"docs/works_with.html", "packages/transformers/README.html"}),
        ("fsdp", {"docs/works_with.html", "docs/islands.html"}),
        ("gradient accumulation", {"docs/works_with.html", "docs/getting_started.html"}),
        ("diloco", {"docs/getting_started.html", "docs/choosing.html", "packages/diloco/README.html"}),
    ],
)
def test_search_finds_users_pages_first(site: Path, browser: Browser, words: str, pages: set[str]) -> None:
    browser.open(site / "search.html", "?q=" + words.replace(" ", "+"))
    found = [link.partition("#")[0].partition("?")[0] for link in browser.evaluate(FOUND)]
    first = [*dict.fromkeys(found)][:5]
    assert pages & {*first[:3]}, first
    inner = [link for link in first if "CHANGELOG" in link or "/src/" in link or "architecture" in link]
    assert not inner, first


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    entries = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    there = {name for kind, names in entries.items() if kind.startswith("py:") for name in names}
    modules = ["hocket", "hocket.errors", *(f"hocket_{word}" for word in KNOWN_WORDS)]
    testing = [
        "topology",
        "compressor",
        "collective",
        "outer",
        "samples",
        "engine",
        "transport",
        "job",
        "faulty",
    ]
    modules += [f"hocket.testing.{name}" for name in testing]
    wanted = {
        f"{module}.{name}"
        for module in modules
        for name in getattr(importlib.import_module(module), "__all__", ())
        if name != "__version__"
    }
    assert len(wanted) > 50
    assert wanted <= there, sorted(wanted - there)


def test_the_reference_of_keys_is_the_sources() -> None:
    page = site_pages.PAGE.read_text()
    stale = page != site_pages.with_configuration(page)
    assert not stale, "docs/configuration.md is not what the source says: tools/site --reference"


def test_every_component_and_its_keys_are_in_the_configuration(site: Path) -> None:
    page = (site / "docs" / "configuration.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    registry = default_registry()
    for word in registry.installed():
        registry.load(word)
    missing = [
        f"{registration.kind.value} {registration.name}"
        for registration in registry.components()
        if f"{registration.kind.value} {registration.name}" not in text
    ]
    assert not missing
    assert "](#" not in text, "a link that is none"
    for key in ("checkpoint", "every", "bandwidth_bits_per_s", "on_nonfinite", "density"):
        assert f'<span class="pre">{key}</span>' in page


SOURCES = REPOSITORY / "packages" / "core-runtime" / "src" / "hocket"


def explained(heading: str) -> set[str]:
    """Return the names in the first column of a table of the troubleshooting page."""
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {
        name for row in re.findall(r"^\|([^|]+)\|", section, re.M) for name in re.findall(r"`([^`]+)`", row)
    }


def test_every_check_of_doctor_is_explained() -> None:
    checks = set()
    for path in SOURCES.glob("cli/doctor*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "Finding.ok",
                "Finding.note",
                "Finding.problem",
                "_drawing",
            ):
                subject = node.args[0]
                if isinstance(subject, ast.Constant):
                    checks.add(subject.value)
                elif isinstance(subject, ast.Name) and subject.id in constants:
                    checks.add(constants[subject.id])
    assert {"interfaces", "mpi packages", "plotly"} <= checks
    assert checks == explained("What `doctor` looks at")


def test_every_error_is_explained() -> None:
    text = "\n".join(path.read_text() for path in REPOSITORY.glob("packages/*/src/**/*.py"))
    parents = dict(re.findall(r"^class (\w+)\((\w+)\):", text, re.M))
    errors = {"HocketError", "RankKilledError"}
    while more := {name for name, parent in parents.items() if parent in errors} - errors:
        errors |= more
    public = {name for name in errors if not name.startswith("_")}
    assert public == explained("Errors")
