"""tools/mechanisms: it knows every mechanism's place, and the plain alternatives do the same work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "packages/core-runtime/benchmarks"


def test_mechanisms_are_where_the_list_says_and_the_page_tells_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from mechanism_list import MECHANISMS

    page = (ROOT / "docs/mechanisms.md").read_text()
    assert len({mechanism.name for mechanism in MECHANISMS}) == len(MECHANISMS) > 15
    for mechanism in MECHANISMS:
        assert (ROOT / "packages" / mechanism.file).exists(), mechanism.file
        assert f"**{mechanism.name}**" in page
        assert Path(mechanism.file).name in page
        with mechanism.without():  # what it replaces is still called so
            pass


@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_mechanism_is_measured_and_its_alternative_ends_with_the_same_weights() -> None:
    options = ["--ranks", "2", "--pairs", "1", "--seconds", "0", "pipes"]
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "mechanisms.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    row = ended.stdout.splitlines()[-1]
    assert row.startswith("| pipes wake whoever carries out schedules | `sgd"), ended.stdout
    assert " to " in row.split("|")[3]


@pytest.mark.parametrize("exact", [True, False])
def test_weights_that_end_elsewhere_are_no_figure(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from mechanisms import DifferentError, Turn, check_same

    start, end = [0.0, 0.0], [3.0, 4.0]
    one = Turn(1.0, 3, ["a", "b"], start, end)
    check_same(one, Turn(2.0, 3, ["a", "b"], start, end), exact=exact)
    other = Turn(1.0, 3, ["a", "c"], start, [3.0, 4.01])
    with pytest.raises(DifferentError, match=r"apart|bits"):
        check_same(one, other, exact=exact)
    if not exact:
        check_same(one, Turn(1.0, 3, ["a", "c"], start, [3.0, 4.001]), exact=False)
