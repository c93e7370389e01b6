"""`hocket --help` and `hocket --version` import no library that they do not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from hocket.cli.main import main
try:
    main()
finally:
    print("imported:", *sorted({"numpy", "omegaconf", "torch", "yaml", "rich"} & {*sys.modules}))
"""


@pytest.mark.usefixtures("afresh")  # a fork has what its parent imported
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["run", "--help"], ["recommend", "--help"]], ids=" ".join
)
def test_help_is_light(words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1].strip() == "imported:", ended.stdout
