"""Plugins that are damaged harm only who names them, and are told of in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError, MissingPluginError
from hocket.plugin import Registry

FINE = "import hocket\n@hocket.api.hookimpl\ndef hocket_register(registry): pass\n"


def refusal(word: str) -> str:
    with pytest.raises(MissingPluginError) as caught:
        Registry().load(word)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import sys\nsys.exit(3)\n", "does not load: it ends the process, with sys.exit(3)"),
        ("raise SystemExit\n", "does not load: it ends the process, with sys.exit()"),
        (
            "import hocket.api, sys\n@hocket.api.hookimpl\ndef hocket_register(registry): sys.exit('no')\n",
            "does not register: it ends the process, with sys.exit('no')",
        ),
    ],
)
def test_one_that_ends_the_process(install: Any, source: str, cause: str) -> None:
    install("sloth", source)
    assert refusal("sloth") == f"plugin 'sloth' of package hocket-sloth 1.0 {cause}"


def test_one_whose_requirements_cannot_be_read(install: Any) -> None:
    install("sloth", FINE, requires=("hocket-core (>=0.1.*)",))
    told = refusal("sloth")
    assert told.startswith(
        "plugin 'sloth' of package hocket-sloth 1.0: the package's metadata cannot be read ("
    )
    assert told.endswith("): reinstall it, or uninstall it")
    assert "\n" not in told


def test_one_without_metadata_is_asked_all_the_same(install: Any, tmp_path: Path) -> None:
    install("sloth", "raise OSError('gone')\n")
    (tmp_path / "hocket_sloth-1.0.dist-info" / "METADATA").unlink()
    assert refusal("sloth").endswith(" does not load: OSError: gone")


def test_a_package_whose_entry_points_cannot_be_read(
    install: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("sloth", "raise OSError('gone')\n")
    install("", "", package="other")
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text("[hocket]\nother other\n")
    assert refusal("sloth").endswith(" does not load: OSError: gone")
    assert any("entry_points.txt that cannot be read" in record.message for record in caplog.records)


def test_a_slip_in_a_name_is_answered_with_one_line_on_the_plugin(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install("sloth", "import sys\nsys.exit(3)\n")
    registry = Registry()
    for _ in range(2):
        with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="there is no recipe 'sgdd'"):
            registry.recipe_file("sgdd")
    assert [record.message for record in caplog.records] == [
        "plugin 'sloth' of package hocket-sloth 1.0 does not load: it ends the process, with sys.exit(3)"
    ]


def test_a_component_of_ones_own_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sloths_own.py").write_text("raise SystemExit(4)\n")
    with pytest.raises(MissingPluginError, match=r"does not import: it ends the process, with sys.exit\(4\)"):
        Registry().resolve("topology", "sloths_own:Ring")


def test_a_plugin_that_is_imported_for_long_is_told(
    install: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.plugin.discovery.LONG_S", 0.05)
    install("sloth", f"import time\ntime.sleep(1.0)\n{FINE}")
    Registry().load("sloth")
    [record] = caplog.records
    assert record.message.startswith(
        "plugin 'sloth' of package hocket-sloth 1.0 is still being imported after 0.05 s"
    )


def test_an_entry_point_that_names_no_module(install: Any, tmp_path: Path) -> None:
    install("sloth", FINE)
    [file] = tmp_path.glob("*sloth*/entry_points.txt")
    file.write_text("[hocket]\nsloth = a b:c d\n")
    assert refusal("sloth").endswith("its entry point 'a b:c d' names no module")
