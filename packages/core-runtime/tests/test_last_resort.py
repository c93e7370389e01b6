"""Warnings say from whom they are, once, and leave the word to an application that sets up logging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


MISTAKE = "import hocket; hocket.compose('sgdd')"
UNLAUNCHED = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def ended(source: str, variables: dict[str, str]) -> tuple[int, str]:
    program = [sys.executable, "-c", source]
    done = subprocess.run(program, capture_output=True, text=True, env=UNLAUNCHED | variables, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("source", "variables", "expected"),
    [
        (MISTAKE, {}, "hocket: rank 0: there is no recipe 'sgdd'. Did you mean 'sgd'"),
        (
            MISTAKE,
            {"RANK": "1", "LOCAL_RANK": "1"},
            "hocket: rank 1: there is no recipe 'sgdd'. Did you mean 'sgd'",
        ),
        ("import hocket; hocket.join('torch')", {"RANK": "2"}, "hocket: rank 0: "),
    ],
)
def test_a_mistake_before_ranks_have_met_is_one_line_too(
    source: str, variables: dict[str, str], expected: str
) -> None:
    status, told = ended(source, TORCHRUN | variables)
    assert (status, told.count("\n")) == (2, 1)
    assert told.startswith(expected)


def test_a_script_that_no_launcher_has_started_shows_where() -> None:
    status, told = ended(MISTAKE, {})
    assert status == 1
    assert told.startswith("Traceback")


def test_other_errors_are_shown_as_before() -> None:
    status, told = ended("import hocket; 1 / 0", TORCHRUN)
    assert status == 1
    assert told.startswith("Traceback")
    assert told.endswith("ZeroDivisionError: division by zero\n")


def test_a_single_rank_of_hocket_launch_shows_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISTAKE)
    command = [sys.executable, "-m", "hocket", "launch", "-n", "1", "--transport", "torch", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=UNLAUNCHED, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("hocket: rank 0: there is no recipe 'sgdd'. Did you mean 'sgd'")
    assert done.stderr.count("\n") == 1
