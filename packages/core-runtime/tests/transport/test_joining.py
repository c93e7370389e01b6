"""How a process finds the world that it was started in."""

from __future__ import annotations

import sys

import pytest

from hocket.errors import UserError
from hocket.transport import join
from hocket.transport.joining import launched_rank, launched_ranks, local_ranks
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import World

_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
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
    assert isinstance(join(), SinglePeer)
    monkeypatch.setenv(variable, "eight")
    with pytest.raises(UserError, match=rf"^{variable}='eight' in the environment is no number of ranks$"):
        launched_ranks()


def test_a_rank_knows_its_number_before_mpi_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert (launched_rank(), local_ranks()) == (3, 4)


def test_without_mpi_a_promise_of_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        UserError, match=r"^Open MPI's mpiexec started 4 ranks, but MPI cannot be used \(.*\): pip"
    ):
        join()


def test_a_virtual_rank_joins_its_own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert World(3).run(lambda: (join().rank, join().size)) == [(rank, 3) for rank in range(3)]


def test_looking_around_does_not_start_mpi() -> None:
    import hocket.transport.mpi.stall

    assert hocket.transport.mpi.stall is not None
    assert "mpi4py.MPI" not in sys.modules
