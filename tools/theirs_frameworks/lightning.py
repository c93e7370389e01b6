"""Lightning's own tests of DDP, on CPUs with HocketStrategy; each rank is a pytest of its own.

Tests that ask for two GPUs run on CPUs. This module is their pytest plugin, too.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import testing

import hocket

RECIPE = os.environ.get("HOCKET_RECIPE", "sgd").split()
NOTHING = "NO HOCKET STRATEGY WAS MADE"
_made: list[int] = []
_init, _reasons, _listdir = pl.Trainer.__init__, testing._runif_reasons, os.listdir


def cases(checkout: Path | None) -> list[str]:
    """Return the names of the tests that name a strategy of DDP's."""
    assert checkout is not None
    tests = checkout / "tests/tests_pytorch"
    found = []
    for file in sorted(tests.rglob("test_*.py")):
        functions = re.split(r"^(?=(?:@|def |class ))", file.read_text(), flags=re.MULTILINE)
        marks = ""
        for function in functions:
            marks += function
            if name := re.match(r"def (test_\w+)", function):
                if re.search(r"\"ddp|DDPStrategy\(|_ddp\b|_ddp_", marks):
                    found.append(f"{file.relative_to(tests)}::{name[1]}")
                marks = ""
    return found


def run(case: str, checkout: Path | None, folder: Path) -> int:
    """Carry out a test as a rank of a job."""
    assert checkout is not None
    tests = checkout / "tests"
    os.environ |= {"SHARED": str(folder)}
    hocket.join()  # before a test compares threads and variables
    sys.path[:0] = [str(tests)]
    os.chdir(tests)
    options = ["-q", "-x", "-rs", "-p", "no:cacheprovider", "-p", __name__, "--color=no"]
    return int(pytest.main([*options, "-c", str(checkout / "pyproject.toml"), f"tests_pytorch/{case}"]))


def skipped(output: str) -> str:
    """Return why a test that did not fail says nothing; empty if it passed."""
    if " passed" not in output:
        found = re.findall(r"^SKIPPED .*?: (.*)$", output, re.MULTILINE)
        return f"skipped: {found[0]}" if found else "nothing was run"
    return "no Trainer of several ranks" if NOTHING in output else ""


@functools.wraps(_init)
def init(self: Any, *given: Any, strategy: Any = "auto", accelerator: Any = "auto", **named: Any) -> None:
    """Make a Trainer with HocketStrategy where the test says DDP."""
    from hocket_lightning import HocketStrategy

    if isinstance(strategy, DDPStrategy) or (isinstance(strategy, str) and strategy.startswith("ddp")):
        strategy = HocketStrategy(*RECIPE)
        _made.append(1)
    if accelerator in ("gpu", "cuda"):
        accelerator = "cpu"
        if isinstance(devices := named.get("devices"), list):
            named["devices"] = len(devices)
    _init(self, *given, strategy=strategy, accelerator=accelerator, **named)


def reasons(*, min_cuda_gpus: int = 0, standalone: bool = False, **named: Any) -> Any:
    """Ask for no GPU, and for no process of its own, which each rank is."""
    return _reasons(**named)


def listdir(path: Any = ".") -> list[Any]:
    """Return the files that tests count: Lightning's own."""
    return [name for name in _listdir(path) if not str(name).endswith(".ckpt.hocket")]


@pytest.fixture
def tmp_path(request: Any) -> Path:
    """Return a folder that all ranks share, as they would on one machine; of cases without DDP each rank's own."""
    marks = repr([mark.args for mark in request.node.iter_markers("parametrize")])
    alone = "ddp" in marks and "ddp" not in repr(request.node.callspec.params)
    own = os.environ["RANK"] if alone else ""
    path = Path(os.environ["SHARED"], own + re.sub(r"\W", "_", request.node.nodeid)[-60:])
    path.mkdir(parents=True, exist_ok=True)
    return path


def pytest_configure(config: Any) -> None:
    """Know the mark of a plugin that runs a test again: files with it were not collected without it."""
    config.addinivalue_line("markers", "flaky: may fail")


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if not _made:
        print(f"\n{NOTHING}")


pl.Trainer.__init__ = init  # type: ignore[method-assign]
testing._runif_reasons = reasons
os.listdir = listdir
