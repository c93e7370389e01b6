"""Tasks by their plain names: in the registry, in a run's file and on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.plugin import Kind, Registry
from hocket.training.run import build_task, load_run, resolved
from hocket_tasks import plugin

NAMES = ["bible", "fashion_mnist", "hyperplane", "videos"]


def test_every_task_is_found_by_its_plain_name() -> None:
    for name in NAMES:
        registry = Registry()
        task = registry.resolve(Kind.TASK, name)
        assert task.__module__ == f"hocket_tasks.{name}"
        assert registry.name_of(Kind.TASK, task) == name
    assert registry.names(Kind.TASK) == sorted(["digits", *NAMES])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_records_its_task_by_the_plain_name(name: str) -> None:
    run = load_run("sgd", [f"task={name}"])
    plain = resolved(run)
    assert plain["task"]["name"] == name
    assert build_task(load_run(plain)) == build_task(run)


def test_the_plugin_imports_no_torch() -> None:
    check = f"import sys, {plugin.__name__}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task={name: fashion_mnist, folder: /nowhere}", "task.folder: the folder /nowhere does not exist."),
        ("task={name: bible, file: /nowhere}", "task.file: /nowhere cannot be read: No such file or directory."),
        ("task={name: videos, hiden: 3}", "override 'task={name: videos, hiden: 3}': task.hiden: unknown key. "),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_ranks_are_started(override: str, expected: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hocket", "run", "sgd", "-n", "2", override]
    ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert all(line.startswith("starting sgd: ") for line in ended.stdout.splitlines())
    [message] = ended.stderr.strip("\0\n").splitlines()
    assert message.startswith(f"hocket: {expected}")
    assert not (tmp_path / "runs").exists()
