"""Which launcher a process has, from environments that real ones have set, and from any others."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import UserError
from hocket.launch.island_jobs import find_in_islands, refuse_without_ranks
from hocket.transport.launchers import Launched, find_launched, looks_launched
from hocket.transport.meeting import Rendezvous

#: What ranks were given by Open MPI 5.0.11, torchrun (torch 2.13) and Slurm 22.05, a rank for each case.
RECORDED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "environments.json").read_text())

TORCHRUN = RECORDED["torchrun"]
MPIEXEC = RECORDED["mpiexec"]
SRUN = RECORDED["srun"]


def found(environment: dict[str, str]) -> Launched:
    launched = find_launched(environment)
    assert launched is not None
    return launched


def test_torchrun() -> None:
    prefix = f"hocket/{TORCHRUN['TORCHELASTIC_RUN_ID']}"
    there = Rendezvous(1, 2, "localhost", int(TORCHRUN["MASTER_PORT"]), prefix, lasts=True)
    assert found(TORCHRUN) == Launched("torchrun", 1, 2, 1, 2, ("torch",), there)


def test_ranks_meet_in_one_place_however_often_their_hosts_have_started_them_again() -> None:
    again = found({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert again.restarts == 2
    assert again.rendezvous == found(TORCHRUN).rendezvous


def test_rank_0_holds_the_store_where_no_agent_does() -> None:
    own = {**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    for environment, serves in (
        ({**TORCHRUN, "RANK": "0"}, False),
        (own, True),
        ({**own, "RANK": "1"}, False),
    ):
        rendezvous = found(environment).rendezvous
        assert rendezvous is not None
        assert rendezvous.serves is serves


def test_mpiexec() -> None:
    assert found(MPIEXEC) == Launched("Open MPI's mpiexec", 1, 2, 1, 2, ("mpi",))
    assert found(
        {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    ) == Launched("MPICH's mpiexec", 3, 4, 1, 2, ("mpi",))


def test_ranks_of_an_mpiexec_can_do_without_mpi_where_somebody_says_where_they_meet() -> None:
    launched = found({**MPIEXEC, "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    assert launched.transports == ("mpi", "torch")
    assert launched.rendezvous == Rendezvous(1, 2, "a", 29500, "hocket")


def test_env() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert found(environment) == Launched(
        "the program that set RANK and WORLD_SIZE",
        0,
        3,
        0,
        1,
        ("torch",),
        Rendezvous(0, 3, "a", 29500, "hocket", True),
    )


@pytest.mark.parametrize(
    ("case", "transports"), [("srun", ("torch",)), ("srun --mpi=pmi2", ("mpi", "torch"))]
)
def test_srun(case: str, transports: tuple[str, ...]) -> None:
    """3 ranks, 2 of them on node0; the last one."""
    launched = found(RECORDED[case])
    assert (launched.launcher, launched.rank, launched.size) == ("srun", 2, 3)
    assert (launched.local_rank, launched.local_size) == (0, 1)
    assert launched.transports == transports
    assert launched.rendezvous is not None
    assert launched.rendezvous.host == "node0"
    assert not launched.rendezvous.serves
    environment = RECORDED[case]
    assert launched.rendezvous.job == f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"


def test_the_steps_of_a_job_meet_at_different_ports() -> None:
    ports = [found({**SRUN, "SLURM_STEP_ID": step}).rendezvous for step in ("0", "1")]
    assert ports[0] is not None
    assert ports[1] is not None
    assert ports[0].port != ports[1].port
    allowed = found({**SRUN, "HOCKET_PORTS": "20000-20003"}).rendezvous
    assert allowed is not None
    assert allowed.port in range(20000, 20004)
    assert allowed.ports == range(20000, 20004)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[0-1]", "node0"),
        ("gpu[003-007,12],login1", "gpu003"),
        ("a", "a"),
        ("a-1,b-2", "a-1"),
        ("rack[1-2]n[05,9]", "rack1n05"),
    ],
)
def test_slurms_first_host(nodes: str, first: str) -> None:
    rendezvous = found({**SRUN, "SLURM_STEP_NODELIST": nodes}).rendezvous
    assert rendezvous is not None
    assert rendezvous.host == first


def test_the_batch_script_of_a_slurm_job_is_no_rank() -> None:
    assert find_launched(RECORDED["sbatch"]) is None


@pytest.mark.parametrize("case", ["mpiexec in sbatch", "torchrun in srun"])
def test_the_innermost_counts(case: str) -> None:
    """The daemons of mpiexec, and torchrun itself, were started by srun, whose variables are in every rank."""
    assert int(RECORDED[case]["SLURM_STEP_NUM_TASKS"]) > 1
    launched = found(RECORDED[case])
    assert launched.launcher == ("torchrun" if "torchrun" in case else "Open MPI's mpiexec")
    assert launched.size == 4


@given(st.lists(st.sampled_from(["torchrun", "mpiexec", "srun"]), unique=True, min_size=1))
def test_the_order_does_not_depend_on_what_else_there_is(cases: list[str]) -> None:
    environment = {name: value for case in cases for name, value in RECORDED[case].items()}
    innermost = min(cases, key=["torchrun", "mpiexec", "srun"].index)
    assert found(environment).launcher == found(RECORDED[innermost]).launcher


def test_a_single_rank_of_torchrun_is_alone_wherever_it_was_started() -> None:
    assert find_launched({**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "eight"},
            "OMPI_COMM_WORLD_SIZE='eight' in the environment is not a number",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "the program that set RANK and WORLD_SIZE started 2 ranks, but MASTER_ADDR or",
        ),
        ({**TORCHRUN, "RANK": "5"}, "rank 5 of 2 in the environment, but ranks are 0 to 1"),
        (
            {**SRUN, "SLURM_STEP_NODELIST": ""},
            "SLURM_STEP_NODELIST='' in the environment does not name a host",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"}, "rank 2 of 2 in the environment"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "torchrun gives local rank 1 of 0"),
        (
            {**TORCHRUN, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun gives local rank 2 of 2",
        ),
        *(
            ({**TORCHRUN, "MASTER_ADDR": name}, f"MASTER_ADDR={name!r} in the environment is not a host name")
            for name in ("http://a", "a b", " ", "127.0.0.1:29500", "..")
        ),
        ({**TORCHRUN, "HOCKET_PORTS": "9" * 5000 + "-1"}, "HOCKET_PORTS='999"),
        ({"OMPI_COMM_WORLD_SIZE": "²"}, "OMPI_COMM_WORLD_SIZE='²' in the environment is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a number"),
    ],
)
def test_what_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        find_launched(changed)
    assert str(refused.value).startswith(message)


VARIABLES = sorted(
    {name for environment in RECORDED.values() for name in environment} | {"PMI_RANK", "PMI_SIZE"}
)
VALUES = st.one_of(
    st.integers(-1, 9).map(str), st.sampled_from(["", "a", "node[0-3]", "2(x2),1", "True", "²", "9" * 5000])
)


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
def test_any_environment_is_understood_or_refused_with_a_reason(environment: dict[str, str]) -> None:
    launched = None
    with contextlib.suppress(UserError):
        launched = find_launched(environment)
    if launched is not None:
        assert launched.size > 1
        assert launched.local_rank >= 0
        assert ("torch" in launched.transports) is (launched.rendezvous is not None)
        if launched.rendezvous is not None:
            assert (launched.rendezvous.rank, launched.rendezvous.size) == (launched.rank, launched.size)


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
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, ["SLURM_PROCID=3"]),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, []),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}, ["MASTER_PORT=12355"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "12355"}, []),
    ],
)
def test_what_looks_like_a_rank(variables: dict[str, str], found: list[str]) -> None:
    assert looks_launched(variables) == found


@pytest.mark.parametrize(
    ("set_to", "message"),
    [
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 in the environment is not a port: allowed are 1 to 65535"),
        (
            {"MASTER_PORT": "99999"},
            "MASTER_PORT=99999 in the environment is not a port: allowed are 1 to 65535",
        ),
        ({"MASTER_ADDR": "a" * 70}, f"MASTER_ADDR={'a' * 70!r} in the environment is not a host name: "),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR='a..b' in the environment is not a host name: "),
    ],
)
def test_where_nobody_can_meet(set_to: dict[str, str], message: str) -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    for environment in (by_hand, TORCHRUN):
        with pytest.raises(UserError) as caught:
            find_launched({**environment, **set_to})
        assert str(caught.value).startswith(message)


def test_a_rank_of_srun_without_the_number_of_its_step_is_refused() -> None:
    environment = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(UserError, match=r"SLURM_PROCID=\d and SLURM_STEP_NUM_TASKS=\d .* but SLURM_STEP_ID"):
        find_launched(environment)


def test_an_address_of_ipv6_may_have_brackets() -> None:
    for name in ("::1", "[::1]", "fe80::1%eth0"):
        rendezvous = found({**TORCHRUN, "MASTER_ADDR": name}).rendezvous
        assert rendezvous is not None
        assert rendezvous.host == name.strip("[]")


def test_a_number_of_ranks_without_a_rank_looks_like_one_of_several() -> None:
    assert find_launched({"WORLD_SIZE": "2"}) is None
    assert looks_launched({"WORLD_SIZE": "2"}) == ["WORLD_SIZE=2"]
    assert looks_launched({"WORLD_SIZE": "1"}) == []


def test_hosts_beyond_number_are_not_listed() -> None:
    assert found({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "7(x999999999)"}).local_size == 7


ISLANDS = {"HOCKET_ISLAND": "1", "HOCKET_ISLANDS": "3", "HOCKET_MEET": "[::1]:29400"}


def test_islands_that_are_jobs_of_their_own_count_on() -> None:
    there = Rendezvous(3, 6, "::1", 29400, "hocket/islands", islands=3)
    assert find_in_islands({**TORCHRUN, **ISLANDS}) == Launched("torchrun", 3, 6, 1, 2, ("torch",), there)
    alone = find_in_islands({**ISLANDS, "HOCKET_ISLAND": "0", "RANK": "0", "WORLD_SIZE": "1"})
    assert alone is not None
    assert alone.rendezvous == Rendezvous(0, 3, "::1", 29400, "hocket/islands", serves=True, islands=3)
    assert find_in_islands({**ISLANDS, "HOCKET_ISLAND": "0", "HOCKET_ISLANDS": "1", "RANK": "0"}) is None
    assert find_in_islands(ISLANDS) is None  # a launcher, whose ranks have numbers
    assert find_in_islands(TORCHRUN) == found(TORCHRUN)
    assert find_in_islands({}) is None


def test_an_island_without_ranks_is_no_world_of_one() -> None:
    with pytest.raises(UserError, match="no launcher started this process"):
        refuse_without_ranks(ISLANDS)
    refuse_without_ranks({})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"HOCKET_MEET": ""}, "HOCKET_ISLAND and HOCKET_ISLANDS in the environment: .* three variables"),
        ({"HOCKET_ISLAND": "3"}, "HOCKET_ISLAND=3 in the environment: 3 islands are numbered 0 to 2"),
        ({"HOCKET_ISLAND": "-1"}, "HOCKET_ISLAND='-1' in the environment is not a number"),
        ({"HOCKET_MEET": "here"}, "HOCKET_MEET='here' in the environment: write .* HOST:PORT"),
        ({"HOCKET_MEET": "here:0"}, "HOCKET_MEET='here:0'"),
    ],
)
def test_variables_of_islands_that_do_not_belong_together(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_in_islands({**TORCHRUN, **ISLANDS, **changed})
