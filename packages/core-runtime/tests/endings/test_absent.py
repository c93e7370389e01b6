"""A rank that ends before it joins the job, or goes on alone: the others end soon, and say which one it was."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.launch import absent
from hocket.transport.launchers import Launched

# Without it the others wait for 300 s, or for ever.
LONGEST_S = 30.0
LAUNCH = [
    sys.executable,
    "-c",
    "from hocket.cli.main import main; main()",
    "launch",
    "-n",
    "3",
    "--transport",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]


@pytest.mark.parametrize("leaving", ["sys.exit(0)", "os._exit(0)"])
@pytest.mark.parametrize(
    ("launch", "variable"),
    [
        ([*LAUNCH, "torch"], "RANK"),
        (TORCHRUN, "RANK"),
        pytest.param(
            [*LAUNCH, "mpi"],
            "OMPI_COMM_WORLD_RANK",
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
            ],
        ),
    ],
    ids=["torch", "torchrun", "mpi"],
)
def test_the_others_end_with_a_line(launch: list[str], variable: str, leaving: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, hocket; os.environ['{variable}'] == '1' and {leaving}; hocket.join()")
    begun_s = time.monotonic()
    ended = subprocess.run(
        [*launch, str(script)], capture_output=True, text=True, timeout=3 * LONGEST_S, check=False
    )
    assert time.monotonic() - begun_s < LONGEST_S
    lines = [line for line in ended.stderr.splitlines() if line.startswith("hocket: rank")]
    assert lines == [
        "hocket: rank 0 waits for rank 1, which has ended before joining the job (sys.exit, or the end of the "
        "script?), so all ranks end. All must call hocket.attach or hocket.join"
    ], ended.stderr
    assert ended.returncode == 1


CAUGHT = """
import torch, hocket
for trial in range(2):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hocket.attach(model, optimizer, "sgd")
    try:
        if session.rank == 1:
            raise ValueError("a bad trial")
        model(torch.ones(1, 2)).sum().backward()
    except ValueError:
        pass
"""


@pytest.mark.parametrize(
    "transport", ["torch", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.full])]
)
def test_one_that_goes_on_after_its_own_error_is_told_of_the_session_that_it_left(
    transport: str, tmp_path: Path
) -> None:
    """Outside of `with session` nothing ends the session, and the others waited for 300 s."""
    script = tmp_path / "script.py"
    script.write_text(CAUGHT)
    begun_s = time.monotonic()
    ended = subprocess.run(
        [*LAUNCH, transport, str(script)], capture_output=True, text=True, timeout=3 * LONGEST_S, check=False
    )
    assert time.monotonic() - begun_s < 2 * LONGEST_S
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("hocket: at step")]
    assert "rank 1 waits for rank" in line
    assert "hocket.attach" in line
    assert (
        "rank 0 is waiting in gradients.0" in line or "rank 0 has not arrived: waiting in gradients.0" in line
    )
    assert "leaves the others in the earlier session: train within `with session:`" in line
    assert ended.returncode == 1


class Host:
    """Processes as Linux shows them in /proc, in a folder."""

    def __init__(self, folder: Path, own: int) -> None:
        self.folder, self.own = folder, own

    def add(self, process: int, parent: int, **variables: object) -> None:
        place = self.folder / str(process)
        place.mkdir()
        (place / "environ").write_text("".join(f"{name}={value}\0" for name, value in variables.items()))
        (place / "stat").write_text(f"{process} (python) S {parent} 0 0")

    def end(self, process: int) -> None:
        (self.folder / str(process) / "environ").write_text("")  # until its parent has taken notice

    def ranks(self, monkeypatch: pytest.MonkeyPatch) -> absent.LocalRanks:
        monkeypatch.setattr("os.getpid", lambda: self.own)
        variables = {"LOCAL_RANK": "0", "MASTER_PORT": "1"}
        return absent.LocalRanks(Launched("torchrun", 4, 8, 0, 2), variables, self.folder)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path, 11)
    host.add(10, 1, PATH="/bin")
    host.add(11, 10, LOCAL_RANK=0, MASTER_PORT=1)
    return host


def test_a_rank_is_gone_when_two_looks_in_a_row_do_not_find_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = host.ranks(monkeypatch)
    assert ranks.can_tell()
    assert ranks.gone() == []  # it may be about to begin
    host.add(12, 10, LOCAL_RANK=1, MASTER_PORT=1)
    assert ranks.gone() == ranks.gone() == ranks.gone() == []
    host.end(12)
    assert ranks.gone() == []
    assert ranks.gone() == [1]


def test_what_a_rank_has_started_and_left_behind_is_not_taken_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add(12, 1, LOCAL_RANK=1, MASTER_PORT=1)
    ranks = host.ranks(monkeypatch)
    assert [ranks.gone(), ranks.gone()] == [[], [1]]


def test_a_rank_of_another_job_is_not_taken_for_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.add(12, 10, LOCAL_RANK=1, MASTER_PORT=2)
    ranks = host.ranks(monkeypatch)
    assert [ranks.gone(), ranks.gone()] == [[], [1]]


def test_nothing_is_said_where_ranks_do_not_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contained = Host(tmp_path, 1)
    contained.add(1, 0, LOCAL_RANK=0, MASTER_PORT=1)  # a container's first process
    assert not contained.ranks(monkeypatch).can_tell()
