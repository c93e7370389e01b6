"""What messages tell a user to install is what installs it, wherever hocket-core came from."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from hocket import installing
from hocket.installing import how_to_install


class Installed(Distribution):
    """hocket-core as pip has installed it, with this `direct_url.json`."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.given = origin

    def read_text(self, filename: str) -> str | None:
        return json.dumps(self.given) if self.given and filename == "direct_url.json" else None

    def locate_file(self, path: Any) -> Any:
        raise AssertionError("it is asked for nothing else")


def told(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, *what: str) -> str:
    monkeypatch.setattr(installing, "distribution", lambda name: Installed(origin))
    return how_to_install(*what)


def test_from_an_index_it_is_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, None, "hocket-eager") == "pip install hocket-eager"
    assert told(monkeypatch, None, "hocket-core", "mpi") == "pip install 'hocket-core[mpi]'"


@pytest.mark.parametrize(("editable", "option"), [(True, "-e "), (False, "")])
def test_from_a_clone_it_is_the_folder(
    editable: bool, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = tmp_path / "a clone" / "packages"
    for name in ("core-runtime", "eager"):
        (packages / name).mkdir(parents=True)
    dir_info = {"editable": True} if editable else {}
    origin = {"url": (packages / "core-runtime").as_uri(), "dir_info": dir_info}
    assert told(monkeypatch, origin, "hocket-eager") == f"pip install {option}'{packages}/eager'"
    assert (
        told(monkeypatch, origin, "hocket-core", "mpi")
        == f"pip install {option}'{packages}/core-runtime[mpi]'"
    )
    assert told(monkeypatch, origin, "hocket-elsewhere") == "pip install hocket-elsewhere"


def test_from_git_it_is_the_same_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = {
        "url": "https://example.org/hocket.git",
        "subdirectory": "packages/core-runtime",
        "vcs_info": {"vcs": "git", "commit_id": "abc123"},
    }
    source = "git+https://example.org/hocket.git@abc123#subdirectory=packages"
    assert told(monkeypatch, origin, "hocket-eager") == f"pip install 'hocket-eager @ {source}/eager'"
    expected = f"pip install 'hocket-core[plot] @ {source}/core-runtime'"
    assert told(monkeypatch, origin, "hocket-core", "plot") == expected


def test_here_it_names_a_package_that_is_there() -> None:
    """As `tools/setup` has installed it: pip's own note, and a folder that holds the package."""
    *_, folder = shlex.split(how_to_install("hocket-core"))
    assert 'name = "hocket-core"' in (Path(folder) / "pyproject.toml").read_text()
    assert Path(sys.modules["hocket"].__file__ or "").is_relative_to(folder)
