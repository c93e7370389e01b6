"""Pages, looked at in a browser that reaches no network."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import comparing
from hocket.installing import how_to_install

#: Carries out a command: its status and what it printed.
Hocket = Callable[..., Any]

MANY = """
from hocket.task import Digits


class Many(Digits):
    def metrics(self, output, target):
        return {f"metric_{number}": output.sum() for number in range(20)}
"""

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1300, 1500

MEASURED = """<script>
const wider = (element) => element.scrollWidth > element.clientWidth;
const table = document.querySelector("table").parentElement;
document.body.dataset.wide = `${wider(table)} ${wider(document.documentElement)}`;
</script></body>"""


@pytest.fixture(scope="session")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    return found


def look(browser: str, page: Path, way: str, width: int = WIDTH) -> subprocess.CompletedProcess[str]:
    """Open a page, let its scripts end, and return what it became (`--dump-dom`) or draw it (`--screenshot=FILE`)."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=8000",
    ]
    command += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={page.parent}/user",
    ]
    command += [f"--window-size={width},{HEIGHT}", way, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in done.stderr, (
        done.stderr
    )  # a script's error, or something that the page has not in itself
    return done


def curves(dom: str) -> int:
    """Return how many lines are drawn, without the legends' examples."""
    return len(re.findall(r'<path class="js-line"', dom))


def share_of_colour(picture: Path, colour: tuple[int, int, int]) -> float:
    from matplotlib.image import imread

    pixels: Any = imread(picture)
    return float((abs(pixels[..., :3] * 255 - colour).max(axis=-1) < 3).mean())


def test_a_comparison(runs: Path, hocket: Hocket, browser: str, tmp_path: Path) -> None:
    targets = ("--target", "accuracy=0.8", "--target", "accuracy=0.9")
    ended = hocket("compare", *sorted(map(str, runs.iterdir())), "--out", str(tmp_path), *targets)
    assert ended.status == 0, ended.err
    page = tmp_path / "index.html"
    dom = look(browser, page, "--dump-dom").stdout
    # Waits, bytes and distance; training loss, validation loss and accuracy over steps, seconds and bytes; two groups.
    assert curves(dom) >= (3 + 3 * 3) * 2
    for text in (
        "dpsgd (3 seeds)",
        "sgd (3 seeds)",
        "Target 1: valid_accuracy of 0.8 or more",
        "Target 2: valid_accuracy of 0.9 or more",
        "differences from dpsgd (3 seeds), seed by seed",
        "MB sent per rank",
    ):
        assert text in dom
    for place in (1, 2):
        assert dom.count(f">target {place}</text>") == 3  # over steps, seconds and bytes
    look(browser, page, f"--screenshot={tmp_path / 'page.png'}")
    for of_group in ((0, 114, 178), (213, 94, 0)):
        assert share_of_colour(tmp_path / "page.png", of_group) > 1e-4


@pytest.mark.full
def test_a_wide_table_fits_or_is_scrolled_and_settings_are_shown(
    runs: Path, hocket: Hocket, browser: str, tmp_path: Path
) -> None:
    for recipe in ("sgd", "dpsgd"):
        for seed in (0, 1):
            name = f"{recipe},optimizer.lr=0.1,strategy.gradients.0.segments=layers,seed={seed}"
            shutil.copytree(runs / f"{recipe}-{seed}", tmp_path / "named" / name)
    words = ("--target", "accuracy=2", "--out", str(tmp_path))
    assert hocket("compare", str(tmp_path / "named"), *words).status == 0
    page = tmp_path / "index.html"
    page.write_text(page.read_text().replace("</body>", MEASURED))
    widths = {}
    for width in (1300, 800):
        dom = look(browser, page, "--dump-dom", width).stdout
        [measured] = re.findall(r'data-wide="([^"]*)"', dom)
        widths[width] = measured
    assert widths == {1300: "false false", 800: "true false"}  # the table, and the page around it
    text = re.sub(r"<wbr>", "", dom)
    assert "never (best 0.9" in text
    assert "± standard deviation (n - 1)" in text
    for row in (
        "<td>strategy.gradients.0.collective.name</td><td>-</td><td>allreduce</td>",
        "<td>strategy.parameters.0.collective.name</td><td>gossip</td><td>-</td>",
    ):
        assert row in text
    in_common = text.partition("Shared settings")[2]
    assert "\nbatch_size: 32\n" in in_common
    assert "seed: 0, 1\n" in in_common


def test_neighbouring_lines_differ_in_colour_and_dashes() -> None:
    from hocket.comparison.group import Curve
    from hocket.comparison.page import _PlottedCurve

    styles = [_PlottedCurve("", place, Curve([], [], [], [])).style for place in range(36)]
    assert len({tuple(style.values()) for style in styles}) == 35
    for one, other in pairwise(styles):
        assert one["color"] != other["color"]
        assert one["dash"] != other["dash"]


@pytest.mark.full
def test_many_metrics(hocket: Hocket, browser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    (tmp_path / "many.py").write_text(MANY)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("-n", "2", "--transport", "virtual", "epochs=2", "task=many:Many", "--report")
    ended = hocket("run", "sgd", *arguments, "--out", str(out))
    assert ended.status == 0, ended.err
    dom = look(browser, out / "report.html", "--dump-dom").stdout
    for number in range(20):
        assert f"valid_metric_{number}" in dom


def test_a_run(hocket: Hocket, browser: str, tmp_path: Path) -> None:
    late = "delays={name: fixed, ranks: [2], seconds: 0.01}"
    arguments = ("-n", "3", "--transport", "virtual", "epochs=2", "compute={step_s: 0.01}", late)
    # A name that is HTML is text.
    out = tmp_path / "<b>run"
    assert hocket("run", "sgp", *arguments, "--report", "--out", str(out)).status == 0
    page = out / "report.html"
    dom = look(browser, page, "--dump-dom").stdout
    assert curves(dom) >= 3 + 3 * 3
    for text in ("digits, sgp, 3 ranks", "&lt;b&gt;run", "The ranks at the end", "name: gossip"):
        assert text in dom
    assert "<b>run" not in dom
    assert hocket("run", "sgp", *arguments, "--overwrite", "--out", str(out)).status == 0
    assert not page.exists()  # of an earlier run


def test_without_plotly_nothing_is_begun(
    runs: Path, hocket: Hocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "find_spec", lambda name: None)
    out = tmp_path / "out"
    for arguments, option in (
        (("compare", str(runs / "sgd-0"), "--out", str(out)), "--out"),
        (("run", "sgd", "--report", "--out", str(out)), "--report"),
        (("run", "sgd", "report=true", "--out", str(out)), "report"),
    ):
        ended = hocket(*arguments)
        install = how_to_install("hocket-core", "plot")
        told = f"hocket: {option} draws with plotly, which is not installed: {install}\n"
        assert (ended.status, ended.out, ended.err) == (2, "", told)
    assert not out.exists()
