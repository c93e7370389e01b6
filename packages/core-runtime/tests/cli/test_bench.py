"""`hocket bench`: a plugin's module run as a program, found by its name with the prefix or without."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hocket.cli import benchmarking
from hocket.cli.listing import describe_plugins
from hocket.errors import UserError
from hocket.plugin import Registry

PLUGIN = """
from hocket.plugin import hookimpl

@hookimpl
def hocket_register(registry):
    registry.benchmark("latency", "a_benchmark", "latency against something")
    registry.benchmark("{only}", "a_benchmark", "something else")
"""
BENCHMARK = """
import sys

if __name__ == "__main__":
    print(sys.argv)
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.syspath_prepend(str(tmp_path))
    for word in ("one", "two"):
        (tmp_path / f"plugin_{word}.py").write_text(PLUGIN.format(only=f"only_{word}"))
    (tmp_path / "a_benchmark.py").write_text(BENCHMARK)
    names = {"one": "plugin_one", "two": "plugin_two", "bad": "no_such_module"}
    registry = Registry(lambda: [EntryPoint(word, module, "hocket") for word, module in names.items()])
    monkeypatch.setattr(benchmarking, "default_registry", lambda: registry)
    monkeypatch.setattr("sys.argv", ["hocket"])
    return registry


@pytest.mark.usefixtures("registry")
def test_a_benchmark_is_run_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("only_one", "one.only_one"):
        benchmarking.bench_command(name, ["--ranks", "4"])
        shown = capsys.readouterr()
        assert shown.out == f"['hocket bench {name}', '--ranks', '4']\n"
        assert "no_such_module" in shown.err


@pytest.mark.usefixtures("registry")
def test_without_a_name_all_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    benchmarking.bench_command(None, [])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "one.latency",
        "one.only_one",
        "two.latency",
        "two.only_two",
    ]
    assert lines[0].endswith("  latency against something")


@pytest.mark.usefixtures("registry")
def test_a_name_that_is_none_or_several_is_refused() -> None:
    with pytest.raises(UserError, match=r"'latency' is ambiguous: write one\.latency or two\.latency"):
        benchmarking.bench_command("latency", [])
    with pytest.raises(
        UserError, match=r"no benchmark 'only_on'\. Did you mean '(one\.)?only_one'\? There are: "
    ):
        benchmarking.bench_command("only_on", [])


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarking, "default_registry", lambda: Registry(list))
    benchmarking.bench_command(None, [])
    assert "hocket-eager has benchmarks, but is not installed: pip install " in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"no benchmark 'partial_allreduce'\. There are: none\. hocket-eager has benchmarks"
    ):
        benchmarking.bench_command("partial_allreduce", [])


def test_plugins_shows_them(registry: Registry) -> None:
    assert "  benchmark     one.latency, one.only_one" in describe_plugins(registry)
