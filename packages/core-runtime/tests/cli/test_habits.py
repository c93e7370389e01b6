"""What users of other launchers and trainers type and expect."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import hocket
from hocket.cli.main import cli


def invoke(*args: str) -> Result:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"], ["-np", "3"], ["--np", "3"], ["--np=3"]])
def test_the_number_of_ranks_as_other_launchers_write_it(words: list[str]) -> None:
    assert "sgd: Synchronous SGD" in (shown := invoke("plan", "sgd", *words).output)
    assert "\n3 ranks; task digits" in shown


def test_help_of_bench_is_help() -> None:
    assert invoke("bench", "--help").output.startswith("Usage: cli bench [NAME] [ARGUMENT]...")


def test_public_names_are_shown() -> None:
    code = "import hocket, sys; print(dir(hocket) == sorted(hocket.__all__), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "True False\n"
    for name in dir(hocket):
        assert getattr(hocket, name) is not None


def test_only_the_main_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> tuple[bool, int]:
        model = nn.Linear(2, 2)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            session.print("rank", session.rank, "of", session.size, sep="-")
            return session.is_main, session.local_rank

    assert hocket.virtual(3).run(train) == [(True, 0), (False, 1), (False, 2)]
    assert capsys.readouterr().out == "rank-0-of-3\n"
