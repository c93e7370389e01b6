"""Values out of range are refused where a run is checked, so that a dry run refuses what the run would refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Hocket = Callable[..., Any]

RUN = ("run", "sgd", "-n", "2", "--transport", "virtual", "steps=2", "-q", "--out", "RUN")

REFUSED = {
    f"seed={2**63}": "seed must be at most 9223372036854775807, not 9223372036854775808",
    "seed=-1": "seed must be 0 or more, not -1",
    "timeout_s=1e10": "timeout_s must be at most 1e+09, not 10000000000.0",
    "timeout_s=.inf": "timeout_s must be finite and more than 0, not inf",
    "optimizer.lr=.inf": "lr is inf; allowed: finite numbers",
    "optimizer={name: adam, betas: [.nan, 0.9]}": "betas: 0 is nan; allowed: finite numbers",
    "optimizer.lr=1" + 400 * "0": "lr is an integer of more than 64 bits",
    "schedulers=[{name: steplr, step_size: 1, gamma: .nan}]": "gamma is nan; allowed: finite numbers",
}

BROKEN = """
from dataclasses import dataclass
from hocket.task import Digits

@dataclass(frozen=True)
class Broken(Digits):
    def loss(self, output, target):
        return super().loss(output, target) * float("nan")
"""


@pytest.fixture(autouse=True)
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("override", REFUSED, ids=lambda override: override[:24])
def test_a_dry_run_refuses_what_the_run_refuses(override: str, hocket: Hocket, within: Path) -> None:
    dry, real = (hocket(*RUN, override, *more) for more in (("--dry-run",), ()))
    assert (dry.status, dry.err) == (2, real.err)
    assert REFUSED[override] in dry.err
    assert not (within / "RUN").exists()


def test_the_largest_seed_trains(hocket: Hocket) -> None:
    assert hocket(*RUN, f"seed={2**63 - 1}").status == 0


@pytest.mark.parametrize(
    "command", [("run", "sgd", "--out"), ("sweep", "sgd", "seed=0,1", "--out"), ("resume",), ("compare",)]
)
@pytest.mark.parametrize("folder", ["", " "])
def test_an_empty_name_is_no_folder(
    folder: str, command: tuple[str, ...], hocket: Hocket, within: Path
) -> None:
    ended = hocket(*command, folder)
    assert (ended.status, "it is empty: name a folder" in ended.err) == (2, True)
    assert not [*within.iterdir()]


@pytest.mark.parametrize("recipe", ["sgd", "local"])
def test_a_run_of_which_every_step_was_skipped_ends_with_an_error(
    recipe: str, hocket: Hocket, within: Path
) -> None:
    (within / "broken_loss.py").write_text(BROKEN)
    ended = hocket("run", recipe, *RUN[2:], "on_nonfinite=skip", "task=broken_loss:Broken")
    assert ended.status == 1
    assert "hocket: NonFiniteError: all 2 steps were skipped" in ended.err
    assert (within / "RUN" / "summary.json").exists()
