"""What a run's folder says of where the run comes from, and the same run made of that folder alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.results.provenance import describe_start, ranks_by_host

TASK = """
from hocket.task import Digits

from mine import scales


class Scaled(Digits):
    def loss(self, output, target):
        return SCALE * scales.ONE * super().loss(output, target)
"""
OPTIMIZER = "import torch\n\n\nclass Plain(torch.optim.SGD):\n    pass\n"
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")


def hocket(*words: str, folder: Path, status: int = 0) -> str:
    """Return what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "hocket", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def starts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "run.json").read_text())
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_folder_says_where_its_run_comes_from_and_makes_it_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "tasks.py").write_text(TASK.replace("SCALE", "3.0"))
    (home / "mine" / "__init__.py").write_text("NAME = 1\n")
    (home / "mine" / "scales.py").write_text(
        "import yaml\nfrom pytest import approx\nfrom plain import ONE\n\n__all__ = ['ONE']\n"
    )
    (home / "plain.py").write_text("ONE = 1.0\n")
    (home / "unused.py").write_text("")
    (home / "optimizers.py").write_text(OPTIMIZER)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *words], cwd=home, check=True)
    run = ["task=mine.tasks:Scaled", "optimizer={name: optimizers:Plain, lr: 0.05}", "checkpoint.every=4"]
    ranks = ["-n", "2", "--transport", "virtual"]
    hocket("run", "sgd", *run, *ranks, "steps=4", "--out", "out", "-q", folder=home)
    out = home / "out"
    [start] = starts(out)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=home, capture_output=True, text=True, check=True
    )
    assert start["git"] == {"commit": commit.stdout.strip(), "dirty": False}
    assert start["directory"] == str(home)
    assert start["command"].startswith("hocket run sgd task=mine.tasks:Scaled 'optimizer={name: opt")
    assert start["python"] == platform.python_version()
    assert {name: start["packages"][name] for name in ("torch", "hocket-core")} == {
        name: version(name) for name in ("torch", "hocket-core")
    }
    assert {name: start["packages"][name] for name in ("PyYAML", "pytest")} == {
        name: version(name) for name in ("PyYAML", "pytest")
    }
    assert "ruff" not in start["packages"]
    assert start["hosts"] == {platform.node(): "0-1"}
    modules = ["mine/__init__.py", "mine/scales.py", "mine/tasks.py", "optimizers.py", "plain.py"]
    assert start["sources"] == [f"source/{name}" for name in modules]
    for name in start["sources"]:
        assert (out / name).read_bytes() == (home / name.removeprefix("source/")).read_bytes()

    (home / "mine" / "tasks.py").write_text(TASK.replace("SCALE", "9.0"))
    (home / "plain.py").rename(home / "elsewhere.py")
    refused = hocket("run", "config.yaml", "--out", "../again", "-q", folder=out, status=2)
    assert "no module 'mine.tasks' in" in refused
    assert refused.endswith(
        "To use the copy of it that this run kept: `cd source`, and write paths as seen from there, such as "
        "../config.yaml\n"
    )
    hocket("run", "../config.yaml", "--out", "../../again", "-q", folder=out / "source")
    assert (home / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()

    (home / "elsewhere.py").rename(home / "plain.py")
    warned = hocket("resume", "out", "steps=6", "-q", folder=home)
    assert "continues with changed code: mine/tasks.py changed since" in warned
    first, second = starts(out)
    assert second["sources"] == [f"source-2/{name}" for name in modules]
    for name, scale in (("source", "3.0"), ("source-2", "9.0")):
        assert (out / name / "mine" / "tasks.py").read_text() == TASK.replace("SCALE", scale)
    assert first == start
    assert (second["command"], second["git"]["dirty"]) == ("hocket resume out steps=6 -q", True)
    assert not list(out.glob("*.next.*"))
    assert "other code" not in hocket("resume", "out", "steps=8", "-q", folder=home)
    assert starts(out)[-1]["sources"] == second["sources"]


def test_hocket_itself_has_a_commit_where_it_is_installed_from_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "check out"
    checkout.mkdir()
    (checkout / "a").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *words], cwd=checkout, check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()
    (checkout / "a").write_text("2")
    info = tmp_path / "site" / "hocket_core-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hocket-core\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert describe_start()["hocket"] is None
    for origin, expected in (
        ({"url": checkout.as_uri(), "dir_info": {"editable": True}}, {"commit": commit, "dirty": True}),
        ({"url": checkout.as_uri(), "dir_info": {}}, None),
        (
            {"url": "https://example.org/hocket", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            {"commit": "abc", "dirty": False},
        ),
    ):
        (info / "direct_url.json").write_text(json.dumps(origin))
        assert describe_start()["hocket"] == expected


def test_ranks_by_host_are_those_of_a_plain_count() -> None:
    generator = np.random.default_rng(0)
    for size in (1, 2, 7, 40):
        names = [f"host{number}" for number in generator.integers(0, 3, size)]
        found = ranks_by_host(names)
        read = {}
        for host, text in found.items():
            for part in text.split(", "):
                first, _, last = part.partition("-")
                read.update(dict.fromkeys(range(int(first), int(last or first) + 1), host))
        assert [read[rank] for rank in range(size)] == names
    assert ranks_by_host(["a", "a", "b", "a", "b", "b"]) == {"a": "0-1, 3", "b": "2, 4-5"}
