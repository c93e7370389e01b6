"""`hocket plugins`: everything that is installed, also what does not load."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hocket import __version__
from hocket.cli.listing import describe_plugins, plugins_command
from hocket.plugin import Registry

GOOD = """
from pathlib import Path
from hocket.plugin import hookimpl

@hookimpl
def hocket_register(registry):
    registry.topology("fair", "a_good_plugin:Fair")
    registry.collective("gossip", "a_good_plugin:Gossip")
    registry.recipe(Path(__file__).with_name("good.yaml"))
    registry.recipe(Path(__file__).with_name("broken.yaml"))
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_good_plugin.py").write_text(GOOD)
    (tmp_path / "good.yaml").write_text("description: Gossip that is fair\ngradients: []\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "a_bad_plugin.py").write_text("import no_such_module_anywhere\n")
    names = {"good": "a_good_plugin", "bad": "a_bad_plugin"}
    return Registry(lambda: [EntryPoint(word, module, "hocket") for word, module in names.items()])


def test_what_plugins_register_and_what_does_not_load(registry: Registry) -> None:
    lines = list(describe_plugins(registry))
    assert lines[0] == f"hocket-core {__version__}"
    assert "  collective    allreduce, broadcast, gossip, reduce, sparse_allreduce" in lines
    assert any(line.startswith("                dpsgd ") and "Decentralised SGD" in line for line in lines)
    good = lines.index("a_good_plugin (good)")
    assert lines[good + 1 : good + 5] == [
        "  topology      good.fair",
        "  collective    good.gossip",
        "  recipes       good         Gossip that is fair",
        "                good.broken  (cannot be read: while parsing a flow node)",
    ] or lines[good + 3 : good + 5] == [
        "  recipes       good.broken  (cannot be read: while parsing a flow node)",
        "                good         Gossip that is fair",
    ]
    [bad] = [line for line in lines if line.startswith("bad: ")]
    assert "does not load: ModuleNotFoundError: No module named 'no_such_module_anywhere'" in bad
    assert lines[-1].startswith("Not installed: hocket-adpsgd, hocket-crossover, ")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plugins_command()
    shown = capsys.readouterr()
    assert shown.out.startswith(f"hocket-core {__version__}\n")
    assert shown.err == ""
