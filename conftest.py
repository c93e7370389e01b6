"""What holds for every package's tests."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import Phase, settings

sys.path.insert(0, str(Path(__file__).parent / "tools"))

from hocket.errors import UserError
from hocket.training.startup import defer_dynamo
from warm_python import forks_in_place_of_starts, started_afresh

pytest_plugins = ["hocket.testing.one_thread"]

#: What tests need beyond pip, by its Debian package: whether it is there, and what the tests that lack it say.
BEYOND_PIP: dict[str, tuple[Callable[[], bool], str]] = {
    "dataset-fashion-mnist": (
        lambda: Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz").exists(),
        "needs Debian's package dataset-fashion-mnist",
    ),
    "bible-kjv-text": (lambda: Path("/usr/lib/bible.data").exists(), "needs Debian's package bible-kjv-text"),
    "iproute2": (lambda: bool(shutil.which("tc") and shutil.which("ip")), "netlab needs"),
    "chromium-headless-shell": (
        lambda: any(map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))),
        "no browser",
    ),
}

#: The numbers of tests that are left out, by what they wait for.
LEFT_OUT = pytest.StashKey[dict[str, int]]()

#: Whether `tools/test --full` runs.
IS_FULL = os.environ.get("HOCKET_CELLS") == "all"

# How long an example takes says nothing here: other processes share the machine.
# Which parts of a failing example matter is not asked: conformance suites are made to fail, too.
# Each run draws other examples, so that CI draws fewer.
settings.register_profile(
    "hocket", deadline=None, phases=set(Phase) - {Phase.explain}, max_examples=100 if IS_FULL else 10
)
settings.load_profile("hocket")

# The tests' own processes start a second earlier, too.
defer_dynamo()


@pytest.fixture(autouse=True, scope="session")
def forked_processes() -> Iterator[None]:
    """Fork the Pythons that tests start, and MPI's ranks, from one that has imported torch; a full run starts each."""
    with contextlib.nullcontext() if IS_FULL else forks_in_place_of_starts():
        yield


@pytest.fixture(scope="module")
def afresh() -> Iterator[None]:
    """Start each Python of a module's tests afresh, where others are forked."""
    with started_afresh():
        yield


@pytest.fixture(autouse=True, scope="session")
def empty_pictures() -> Iterator[None]:
    """Have runs in this process leave an empty picture: drawing takes longer than most of them train."""
    figure = MagicMock()
    figure.savefig = lambda picture, dpi: picture.write_bytes(b"\x89PNG")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.training.picture.new_figure", lambda width, height: figure)
        yield


@pytest.fixture
def drawn_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs draw their picture after all."""
    from hocket.pictures import new_figure

    monkeypatch.setattr("hocket.training.picture.new_figure", new_figure)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Let tests import the modules beside them: with --import-mode=importlib they do not find them."""
    if (folder := str(module_path.parent)) not in sys.path:
        sys.path.insert(0, folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of GPUs where there is none, and what says little more than the rest, but in a full run."""
    left_out = {}
    of_gpus = _marked(items, "gpu")
    if of_gpus and not _has_gpu():
        left_out["of GPUs, as torch finds no CUDA device"] = of_gpus
    if not IS_FULL:
        rest = [item for item in items if item not in of_gpus]
        left_out["that `tools/test --full` runs"] = {*_marked(rest, "full"), *_further_products(rest)}
    dropped = {item for each in left_out.values() for item in each}
    config.stash[LEFT_OUT] = {why: len(each) for why, each in left_out.items()}
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [item for item in items if item not in dropped]


def _marked(items: list[pytest.Item], mark: str) -> set[pytest.Item]:
    return {item for item in items if item.get_closest_marker(mark)}


def _further_products(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the items without which each value of each parameter is still in one, of tests marked `one_of_each`."""
    of_test = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("one_of_each") and not item.get_closest_marker("full")
        if marked and isinstance(item, pytest.Function):
            of_test[item.nodeid.partition("[")[0]].append(item)
    for test, products in of_test.items():
        Random(test).shuffle(products)  # the same in each process
        # An id for each `parametrize`.
        values = {item: {*enumerate(item.callspec._idlist)} for item in products}
        left = set().union(*values.values())
        while left:
            best = max(products, key=lambda item: len(values[item] & left))
            products.remove(best)
            left -= values[best]
        yield from products


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the numbers of tests that are left out from an xdist worker; each of them collects all tests."""
    if counts := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = counts


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip a test that ends in Hocket's word that a data set is not installed, where it is not."""
    try:
        return (yield)
    except UserError as error:
        found = re.search(r"`apt install ([\w-]+)`", str(error))
        if found is None or found[1] not in BEYOND_PIP or BEYOND_PIP[found[1]][0]():
            raise
        pytest.skip(BEYOND_PIP[found[1]][1])


def _skipped_for_want(reporter: Any) -> Counter[str]:
    """Return how many tests were skipped as a package is not there, by the package; once for all of xdist's workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return Counter()
    told = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
    lacking = {name: says for name, (is_there, says) in BEYOND_PIP.items() if not is_there()}
    return Counter(name for text in told for name, says in lacking.items() if says in text)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests this machine could not carry out, and what to install for them."""
    for why, count in config.stash.get(LEFT_OUT, {}).items():
        if count:
            terminalreporter.write_line(f"left out: {count} tests {why}")
    counts = _skipped_for_want(terminalreporter)
    if counts:
        told = ", ".join(f"{count} for want of {name}" for name, count in counts.items())
        terminalreporter.write_line(
            f"not carried out here: {told}. They are with: apt install {' '.join(counts)}"
        )
        if path := os.environ.get("HOCKET_SKIPPED"):
            with Path(path).open("a") as file:
                file.writelines(f"{name} {count}\n" for name, count in counts.items())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End with an error where nothing may be skipped so."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("HOCKET_SKIP_NOTHING") and reporter is not None and _skipped_for_want(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """Leave torch's modules and the tests themselves, a million objects, out of every later garbage collection."""
    gc.collect()
    gc.freeze()
