"""`hocket bench`: the benchmarks of core and of all installed plugins."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from hocket.errors import MissingPluginError, UserError, suggest
from hocket.installing import how_to_install
from hocket.plugin import Benchmark, Registry, default_registry

#: The plugins of Hocket's own that have benchmarks.
_WITH_BENCHMARKS = ("eager",)


def bench_command(name: str | None, arguments: Sequence[str]) -> None:
    """Carry out `hocket bench NAME ARGUMENT...`."""
    registry = default_registry()
    for word in registry.installed():
        try:
            registry.load(word)
        except MissingPluginError as error:
            print(f"hocket: {error}", file=sys.stderr)
    if name is None:
        _list(registry)
        return
    benchmark = find_benchmark(registry, name)
    sys.argv = [f"hocket bench {name}", *arguments]
    runpy.run_module(benchmark.module, run_name="__main__")


def find_benchmark(registry: Registry, name: str) -> Benchmark:
    """Return the loaded benchmark called `name`, with the plugin's prefix or without.

    Raises:
        UserError: there is none of this name, or several; lists them.
    """
    found = [b for b in registry.benchmarks() if name in (b.name, b.name.rpartition(".")[2])]
    if len(found) == 1:
        return found[0]
    known = [benchmark.name for benchmark in registry.benchmarks()]
    if found:
        raise UserError(
            f"benchmark {name!r} is ambiguous: write {' or '.join(benchmark.name for benchmark in found)}"
        )
    near = suggest(name, [*known, *(full.rpartition(".")[2] for full in known)])
    raise UserError(
        f"there is no benchmark {name!r}.{near} There are: {', '.join(known) or 'none'}.{_elsewhere(registry)}"
    )


def _list(registry: Registry) -> None:
    benchmarks = registry.benchmarks()
    width = max((len(benchmark.name) for benchmark in benchmarks), default=0)
    for benchmark in benchmarks:
        print(f"{benchmark.name:<{width}}  {benchmark.description}")
    if not benchmarks:
        print("no installed plugin has a benchmark." + _elsewhere(registry))


def _elsewhere(registry: Registry) -> str:
    """Return a sentence on packages with benchmarks that are not installed; empty if there are none."""
    packages = [f"hocket-{word}" for word in _WITH_BENCHMARKS if word not in registry.installed()]
    return "".join(
        (f" {each} has benchmarks, but is not installed: {how_to_install(each)}") for each in packages
    )
