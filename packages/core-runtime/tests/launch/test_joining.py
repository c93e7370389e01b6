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
from hocket.cli.run_options import RunOptions
from hocket.cli.wanted_ranks import WantedRanks
from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.launch import joining
from hocket.launch.joining import chosen_transport, join, launched, launched_rank
from hocket.training.run import RunConfig
from hocket.transport.launchers import Launched, looks_launched
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import VirtualWorld

_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_ID"),
    *("PMIX_RANK", "LOCAL_RANK"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_outside_of_a_launcher_there_is_one_rank() -> None:
    assert launched() is None
    assert launched_rank() == 0
    assert isinstance(join(), SinglePeer)


def test_a_promise_of_one_rank_hides_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A left-over WORLD_SIZE=1, and srun."""
    for variable, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")):
        monkeypatch.setenv(variable, value)
    assert launched() is None
    assert isinstance(join(), SinglePeer)
    for variable, value in (
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "a"),
    ):
        monkeypatch.setenv(variable, value)
    found = launched()
    assert found is not None
    assert (found.launcher, found.size, launched_rank()) == ("srun", 4, 3)


def test_a_launcher_that_is_not_understood_is_rank_0_for_who_only_wants_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "eight")
    with pytest.raises(UserError):
        join()
    assert launched_rank() == 0


def test_mpi_is_chosen_where_it_is_installed_and_ranks_can_meet_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {can: Launched("it", 0, 2, transports=can) for can in [("mpi",), ("torch",), ("mpi", "torch")]}
    monkeypatch.setattr(joining, "why_no_mpi4py", lambda: None)
    assert [chosen_transport(launched) for launched in found.values()] == ["mpi", "torch", "mpi"]
    monkeypatch.setattr(joining, "why_no_mpi4py", lambda: "")
    assert [chosen_transport(launched) for launched in found.values()] == ["mpi", "torch", "torch"]
    assert chosen_transport(found["mpi", "torch"], "mpi") == "mpi"
    with pytest.raises(
        UserError,
        match=r"^it starts ranks for transport torch, not mpi: start without this launcher, or do not name a",
    ):
        chosen_transport(found["torch",], "mpi")


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

    monkeypatch.setattr(running, "_start", launch)
    monkeypatch.setattr(ranking, "run_virtual", launch)
    with contextlib.suppress(StopIteration):
        running.run_command(
            "sgd",
            ("task=digits",),
            WantedRanks(2, transport=transport),
            tmp_path / "out",
            RunOptions(),
            resume=False,
            overwrite=False,
        )
    assert begun == [2]


@pytest.mark.parametrize("variables", [{"PMIX_RANK": "3"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_one_rank_in_what_looks_like_a_job_is_told(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    joining._warn_of_strangers.cache_clear()
    for warns in (False, True, True):
        assert isinstance(join(warn_alone=warns), SinglePeer)
    messages = [record.getMessage() for record in caplog.records]
    found = looks_launched(variables)
    assert len(messages) == bool(found)
    assert all(text in message for message in messages for text in found)


def test_without_mpi_a_promise_of_ranks_is_an_error() -> None:
    message = _in_a_process(
        "sys.modules['mpi4py'] = None\n"
        "from hocket.errors import UserError\n"
        "from hocket.launch.joining import join\n"
        "try:\n    join()\nexcept UserError as error:\n    print(error)",
        OMPI_COMM_WORLD_SIZE="4",
    )
    assert message.startswith("Open MPI's mpiexec started 4 ranks, but MPI cannot be used (")
    install = how_to_install("hocket-core", "mpi")
    assert f"): {install}, or start them with `hocket launch --transport torch`" in message


def test_a_virtual_rank_joins_its_own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert VirtualWorld(3).run(lambda: (join().rank, join().size)) == [(rank, 3) for rank in range(3)]


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_mpi_starts_only_for_who_asks() -> None:
    assert (
        _in_a_process(
            "import hocket.transport.mpi\n"
            "from hocket.launch.joining import join\n"
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


def test_a_launcher_begins_without_torch() -> None:
    assert _in_a_process("import hocket.cli.launching\nprint('torch' in sys.modules)") == "False"
