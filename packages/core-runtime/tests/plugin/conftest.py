"""A place where plugins are installed as pip does it: modules with `.dist-info` folders on `sys.path`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a plugin from the source of its one module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def install(
        word: str, source: str, package: str = "", version: str = "1.0", requires: tuple[str, ...] = ()
    ) -> None:
        package = package or f"hocket-{word}"
        module = package.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        folder = tmp_path / f"{module}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        if word:
            (folder / "entry_points.txt").write_text(f"[hocket]\n{word} = {module}\n")
        importlib.invalidate_caches()

    yield install
    for module in modules:
        sys.modules.pop(module, None)
