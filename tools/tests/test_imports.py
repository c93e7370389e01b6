"""The import contract: which folder may know which, no circles, and what plugins may import.

Imports for type checkers and within functions count too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import hocket
from hocket import api

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

from source_tree import SourceTree, circles  # noqa: E402 (found in `tools`)

#: Core's folders and top-level modules, the lowest floor first. One may import those of lower floors only.
FLOORS = """
    plain
    arrays errors last_resort draws installing randomness strict_json patience
    configured disk pictures plugin quantities
    kernels own_files schedule
    transport
    launch topology outer segment delays loggers trace checkpoint progress
    compressor config messages results
    collective
    strategy
    plan
    session
    task
    training
    comparison
    cli testing api
    __main__
""".strip().splitlines()


#: `hocket` and what it exports itself.
PUBLIC = {"hocket", *(f"hocket.{name}" for name in hocket.__all__)}


def violations(source: SourceTree) -> Iterator[str]:
    """Yield a sentence for each import that the contract does not allow, and for each circle of files."""
    graph = source.imports
    floors = {folder: floor for floor, line in enumerate(FLOORS) for folder in line.split()}
    for name in sorted(graph):
        if _package(name) == "hocket":
            yield from _of_core(name, sorted(graph[name]), floors)
        else:
            yield from _of_plugin(name, source.everything_imported(name))
    for circle in circles({name: frozenset(imported) for name, imported in graph.items()}):
        yield f"a circle of imports: {', '.join(circle)}"


def _of_core(name: str, imported: Iterable[str], floors: dict[str, int]) -> Iterator[str]:
    if name == "hocket":
        return
    folder = name.split(".")[1]
    if folder not in floors:
        yield f"{name}: {folder} is on no floor of the contract"
        return
    for other in imported:
        if _package(other) != "hocket":
            yield f"{name} imports {other}: core knows no plugin"
        elif (
            other != "hocket"
            and folder != (above := other.split(".")[1])
            and floors[folder] <= floors.get(above, 99)
        ):
            yield f"{name} imports {other}: {above} is not below {folder}"


def _of_plugin(name: str, imported: Iterable[str]) -> Iterator[str]:
    for other in imported:
        public = other in PUBLIC or other.startswith(("hocket.api.", "hocket.errors.", "hocket.testing"))
        if other.startswith("hocket") and not public and _package(other) != _package(name):
            allowed = "hocket, hocket.api, hocket.errors, hocket.testing and their own modules"
            yield f"{name} imports {other}: plugins import {allowed}"


def _package(name: str) -> str:
    return name.partition(".")[0]


@pytest.fixture(scope="module")
def source() -> SourceTree:
    return SourceTree(
        REPOSITORY, [path.relative_to(REPOSITORY) for path in REPOSITORY.glob("packages/*/src")]
    )


def test_the_contract_is_kept(source: SourceTree) -> None:
    assert list(violations(source)) == []


def test_plugins_import_every_name_of_the_api(source: SourceTree) -> None:
    imported = {name for module in source.modules for name in source.everything_imported(module)}
    of_users = {"Classification"}  # a user's own task is one: docs/own_task.md
    unused = set(dir(api)) - of_users - {name.removeprefix("hocket.api.") for name in imported}
    assert not unused, "a name that no plugin imports is no part of the contract: leave it out"


BROKEN = {
    "upwards": (
        {"hocket/transport/peer.py": "from hocket.session.api import Session"},
        "session is not below transport",
    ),
    "upwards for type checkers": (
        {"hocket/config/a.py": "if TYPE_CHECKING:\n    import hocket.strategy.compose"},
        "strategy is not below config",
    ),
    "upwards in a function": (
        {"hocket/kernels/a.py": "def late():\n    from hocket.transport import peer"},
        "transport is not below kernels",
    ),
    "between folders of a floor": (
        {"hocket/topology/plain.py": "from hocket.segment.segment import Segment"},
        "segment is not below topology",
    ),
    "a circle of files": (
        {
            "hocket/session/api.py": "from hocket.session import loader",
            "hocket/session/loader.py": "import hocket.session.api",
        },
        "a circle of imports: hocket.session.api, hocket.session.loader",
    ),
    "core imports a plugin": (
        {"hocket/cli/main.py": "import hocket_eager.collective"},
        "core knows no plugin",
    ),
    "a folder without a floor": ({"hocket/utils/a.py": ""}, "utils is on no floor"),
    "a plugin imports core's insides": (
        {"hocket_eager/channel.py": "from hocket.transport.peer import Peer"},
        "hocket_eager.channel imports hocket.transport.peer.Peer: plugins import",
    ),
    "a plugin imports another": (
        {"hocket_eager/channel.py": "from hocket_redsync import state"},
        "hocket_eager.channel imports hocket_redsync.state: plugins import",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tree_is_found(name: str, tmp_path: Path) -> None:
    files, expected = BROKEN[name]
    modules = ("transport/peer", "session/api", "strategy/compose", "segment/segment")
    kept = {f"hocket/{module}.py": "" for module in modules} | {
        "hocket_eager/collective.py": "from hocket.api import Collective\nimport hocket, hocket.testing.job",
        "hocket_redsync/state.py": "",
        "hocket/session/session.py": "from hocket.transport.peer import Peer",
    }
    for path, text in {**kept, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = list(violations(SourceTree(tmp_path, [Path(".")])))
    assert len(found) == 1, found
    assert expected in found[0]
