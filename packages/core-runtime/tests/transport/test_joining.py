"""A process finds the world that it was started in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from hocket.cli import ranking, running
from hocket.errors import UserError
from hocket.training.run import RunConfig
from hocket.transport import join, joining
from hocket.transport.joining import launched_rank, launched_ranks, local_ranks, unknown_launcher
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import World

_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    *("PMIX_RANK", "LOCAL_RANK"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_outside_of_a_launcher_there_is_one_rank() -> None:
    assert launched_ranks() is None
    assert (launched_rank(), local_ranks()) == (0, 1)
    assert isinstance(join(), SinglePeer)


@pytest.mark.parametrize(
    ("variable", "launcher"),
    [
        ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"),
        ("PMI_SIZE", "MPICH's mpiexec"),
        ("WORLD_SIZE", "torchrun"),
        ("SLURM_STEP_NUM_TASKS", "srun"),
    ],
)
def test_launchers_are_told_apart(variable: str, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "8")
    assert launched_ranks() == (launcher, 8)
    monkeypatch.setenv(variable, "1")
    assert launched_ranks() is None
    assert isinstance(join(), SinglePeer)
    monkeypatch.setenv(variable, "eight")
    with pytest.raises(UserError, match=rf"^{variable}='eight' in the environment is no number of ranks$"):
        launched_ranks()


def test_a_promise_of_one_rank_hides_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --pty bash`, and torchrun in it; a left-over WORLD_SIZE=1, and srun."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert launched_ranks() == ("srun", 4)


@pytest.mark.parametrize("transport", ["mpi", "virtual"])
def test_a_run_in_the_shell_of_a_job_starts_its_own_ranks(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, value in (("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(variable, value)
    begun: list[int | None] = []

    def launch(run: RunConfig, *rest: object, **more: object) -> NoReturn:
        begun.append(run.ranks)
        raise StopIteration

    monkeypatch.setattr(running, "_launch", launch)
    monkeypatch.setattr(ranking, "run_virtual", launch)
    with contextlib.suppress(StopIteration):
        running.run_command(
            "sgd",
            ("task=digits",),
            ranks=2,
            transport=transport,
            out=tmp_path / "out",
            resume=False,
            trace=False,
        )
    assert begun == [2]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"},
            ["MV2_COMM_WORLD_RANK=0", "MV2_COMM_WORLD_SIZE=4"],
        ),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, ["FLUX_JOB_SIZE=2", "FLUX_TASK_RANK=0"]),
        ({"PMIX_RANK": "3"}, ["PMIX_RANK=3"]),
        ({"PALS_RANKID": "1"}, ["PALS_RANKID=1"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "BATCH_SIZE": "32", "OMPI_UNIVERSE_SIZE": "8"}, []),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, []),  # an sbatch script is no rank
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, []),
    ],
)
def test_one_rank_in_what_looks_like_a_job_is_told(
    variables: dict[str, str],
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert unknown_launcher() == found
    joining._warn_of_strangers.cache_clear()
    for _ in range(2):
        assert isinstance(join(), SinglePeer)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(found)
    assert all(text in message for message in messages for text in found)


def test_a_rank_knows_its_number_before_mpi_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert (launched_rank(), local_ranks()) == (3, 4)


def test_without_mpi_a_promise_of_ranks_is_an_error() -> None:
    message = _in_a_process(
        "sys.modules['mpi4py'] = None\n"
        "from hocket.errors import UserError\n"
        "from hocket.transport import join\n"
        "try:\n    join()\nexcept UserError as error:\n    print(error)",
        OMPI_COMM_WORLD_SIZE="4",
    )
    assert message.startswith("Open MPI's mpiexec started 4 ranks, but MPI cannot be used (")
    assert message.endswith("): pip install 'hocket-core[mpi]'")


def test_a_virtual_rank_joins_its_own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert World(3).run(lambda: (join().rank, join().size)) == [(rank, 3) for rank in range(3)]


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_mpi_starts_only_for_who_asks() -> None:
    assert (
        _in_a_process(
            "import hocket.transport.mpi\n"
            "from hocket.transport import join\n"
            "join()\n"
            "print('mpi4py.MPI' in sys.modules)"
        )
        == "False"
    )


def _in_a_process(code: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return ended.stdout.strip()
