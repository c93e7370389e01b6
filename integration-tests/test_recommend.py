"""The first answer of `hocket recommend` with all plugins: short, of one row a family, and true to their absence."""

from __future__ import annotations

import json
from importlib.metadata import entry_points

import pytest
from click.testing import CliRunner

from hocket.cli.main import cli
from hocket.plugin import Registry

SITUATION = ("--params", "25M", "--hosts", "4x1", "--step", "500ms")


def recommend(*more: str) -> str:
    told = CliRunner().invoke(cli, ["recommend", *SITUATION, *more], catch_exceptions=False)
    assert told.exit_code == 0
    return told.stdout


@pytest.mark.parametrize("bandwidth", ["100mbit", "1gbit", "1tbit"])
@pytest.mark.parametrize("more", [(), ("optimizer=sgd",), ("--late", "1x300ms")], ids=" ".join)
def test_it_fits_a_screen(bandwidth: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = recommend("--bandwidth", bandwidth, *more).splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith("*")]) == 1


def test_the_row_of_every_recipe_fits_seventy_nine_columns() -> None:
    lines = recommend("--bandwidth", "100mbit", "--all").splitlines()
    rows = lines[3 : lines.index("", 3)]
    assert len(rows) > 30
    assert max(map(len, rows)) <= 79


def test_families_stand_side_by_side() -> None:
    lines = [line.lstrip("* ") for line in recommend("--bandwidth", "100mbit").splitlines()[4:9]]
    families = [line.split()[0].partition(".")[0].rstrip(",") for line in lines]
    assert families[-1] == "agd"
    assert {"diloco", "powersgd", "redsync"} <= {*families}
    assert len({*families}) == 5


def test_a_recipe_that_needs_an_absent_plugin_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [entry for entry in entry_points(group="hocket") if entry.name == "diloco"]
    monkeypatch.setattr("hocket.cli.recommending.default_registry", lambda: Registry(lambda: there))
    assert json.loads(recommend("--json"))["left_out"]["diloco.quorum"] == "needs hocket-eager"


def test_a_late_rank_does_not_make_a_large_loss_worth_it() -> None:
    """Of two strategies that are far faster than allreduce, the faster one loses 17.5 %, the other one 5.3 %."""
    situation = ("--params", "25M", "--hosts", "8x1", "--step", "100ms", "--bandwidth", "100mbit")
    told = CliRunner().invoke(cli, ["recommend", *situation, "--late", "1x300ms", "--json"])
    advice = json.loads(told.stdout)
    rows = {row["strategy"]: row for row in advice["strategies"]}
    fast, good = rows["diloco.sparseloco"], rows["powersgd"]
    assert fast["step_s"] < good["step_s"] < rows["agd"]["step_s"] / 20
    assert fast["loss_percent"] > 2 * good["loss_percent"]
    assert advice["best"] == "powersgd"
