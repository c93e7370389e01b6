"""Warnings say from whom they are, once, and leave the word to an application that sets up logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARNS = "import logging, hocket\n{}\nlogging.getLogger('hocket').warning('%d ranks', 2)"
OWN = "logging.getLogger('hocket').addHandler(logging.StreamHandler())"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "hocket: warning: 2 ranks\n"),
        ("logging.basicConfig(format='%(name)s %(message)s')", "hocket 2 ranks\n"),
        (OWN, "2 ranks\n"),
        ("logging.getLogger('hocket').setLevel('ERROR')", ""),
    ],
)
def test_who_prints(before: str, expected: str) -> None:
    program = [sys.executable, "-c", WARNS.format(before)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", expected)
