"""The launcher of this process, and the rendezvous of its ranks, read from environment variables; pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address

from hocket.errors import UserError
from hocket.transport.meeting import Rendezvous, parse_ports

#: Names the ports on which ranks may listen, for instance 20000-20100, where a firewall lets no others pass.
PORTS_VARIABLE = "HOCKET_PORTS"

# Above those that Linux hands out by itself.
_SLURM_PORTS = range(61440, 65536)

# Where a size is not called as its rank is.
_SIZES = {"FLUX_TASK_RANK": "FLUX_JOB_SIZE", "MPIRUN_RANK": "MPIRUN_NPROCS", "PMIX_RANK": "PMIX_SIZE"}

# What int takes, and no other sign that Unicode calls a digit.
_NUMBER = re.compile(r"[0-9]{1,18}")

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launched:
    """The facts that a launcher gives one of its ranks.

    Attributes:
        launcher: its name, for messages.
        rank: this process's number.
        size: number of ranks that it has started.
        local_rank: this process's number on its host.
        local_size: number of ranks on this host; 1 where the launcher does not say.
        transports: the possible transports of its ranks, the best first: `mpi`, `torch`.
        rendezvous: the ranks' store over `torch`; None where they have none.
        restarts: number of times that the launcher has restarted the job.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    transports: tuple[str, ...] = ("mpi",)
    rendezvous: Rendezvous | None = None
    restarts: int = 0


def find_launched(environment: Environment) -> Launched | None:
    """Return the innermost launcher's facts; None outside one, and if it has started one rank.

    A shell within a job has one rank, and so have variables left in the environment. So one rank hides no outer
    launcher; but torchrun's does, as torchrun leaves no variables behind.

    Args:
        environment: as `os.environ`.

    Raises:
        UserError: a variable holds no number, or one of a set is missing; names it.
    """
    for find in (_torchrun, _open_mpi, _mpich, _by_hand, _srun):
        found = find(environment)
        if found is not None:
            if found.size < 2:
                return None
            _check(found)
            return found
    return None


def _check(found: Launched) -> None:
    """Refuse numbers that contradict each other.

    Raises:
        UserError: they contradict each other; names them.
    """
    if found.rank >= found.size:
        raise UserError(
            f"rank {found.rank} of {found.size} in the environment, but ranks are 0 to {found.size - 1}: correct the "
            f"variables of {found.launcher}, or unset them"
        )
    # A launcher that does not give the host's number of ranks has 1 for it.
    if found.local_size < 1 or (found.local_size > 1 and found.local_rank >= found.local_size):
        raise UserError(
            f"{found.launcher} gives local rank {found.local_rank} of {found.local_size}, but local ranks are "
            "counted from 0, below the local size. Correct its variables (such as LOCAL_RANK and LOCAL_WORLD_SIZE)"
        )


def looks_launched(environment: Environment) -> list[str]:
    """Return the variables, with values, that suggest that a process is one of several ranks."""
    numbers = {name: int(value) for name, value in environment.items() if _NUMBER.fullmatch(value)}
    ranks = {
        name: rank for name, rank in numbers.items() if re.fullmatch(r"(.+_)?RANK(ID)?|SLURM_PROCID", name)
    }
    found = {name for name, rank in ranks.items() if rank > 0}
    for name, rank in ranks.items():
        for size in (name.removesuffix("ID").removesuffix("RANK") + "SIZE", _SIZES.get(name, "")):
            if numbers.get(size, 0) > max(1, rank):
                found |= {name, size}
    if numbers.get("WORLD_SIZE", 0) > 1 and "RANK" not in environment:
        found.add("WORLD_SIZE")
    if "MASTER_PORT" in numbers and "RANK" not in environment:
        found.add("MASTER_PORT")
    return [f"{name}={numbers[name]}" for name in sorted(found)]


def _torchrun(environment: Environment) -> Launched | None:
    # A program that one of its ranks starts has the variables, too, and may have started ranks itself.
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is None or "RANK" not in environment:
        return None
    restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT")
    # Not the restarts: hosts count them apart.
    return _by_torch(environment, "torchrun", f"hocket/{run}", restarts)


def _open_mpi(environment: Environment) -> Launched | None:
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    if size < 2:
        return None
    rank, local_rank, local_size = (
        _number(environment, f"OMPI_COMM_WORLD_{name}", default)
        for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 1))
    )
    return _by_mpi(environment, Launched("Open MPI's mpiexec", rank, size, local_rank, local_size))


def _mpich(environment: Environment) -> Launched | None:
    size = _number(environment, "PMI_SIZE")
    if size < 2:
        return None
    rank = _number(environment, "PMI_RANK")
    srun = _srun(environment)
    if srun is not None and (srun.size, srun.rank) == (size, rank):
        return srun  # with --mpi=pmi2
    local_rank, local_size = (
        _number(environment, "MPI_LOCALRANKID"),
        _number(environment, "MPI_LOCALNRANKS", 1),
    )
    return _by_mpi(environment, Launched("MPICH's mpiexec", rank, size, local_rank, local_size))


def _by_hand(environment: Environment) -> Launched | None:
    """Read torch's env:// variables, which Lightning, accelerate, Kubeflow and `hocket launch` set, too."""
    if _number(environment, "WORLD_SIZE") < 2 or "RANK" not in environment:
        return None
    return _by_torch(environment, "the program that set RANK and WORLD_SIZE", "hocket")


def _srun(environment: Environment) -> Launched | None:
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    if size < 2 or "SLURM_PROCID" not in environment:
        return None
    rank = _required(environment, "SLURM_PROCID", "srun")
    if "SLURM_STEP_ID" not in environment:
        raise UserError(
            f"SLURM_PROCID={rank} and SLURM_STEP_NUM_TASKS={size} in the environment look like a rank of srun, but "
            "SLURM_STEP_ID is missing: start the ranks by srun, or unset both"
        )
    node = _number(environment, "SLURM_NODEID")
    host, port = _chosen_meeting(environment) or _slurms_meeting(environment)
    return Launched(
        "srun",
        rank,
        size,
        _number(environment, "SLURM_LOCALID"),
        _tasks_of_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        # Without a process manager's interface each of MPI's ranks would believe to be alone.
        ("mpi", "torch") if {"PMIX_RANK", "PMI_RANK"} & environment.keys() else ("torch",),
        _rendezvous(environment, rank, size, host, port, "hocket", _slurm_step(environment)),
    )


def _slurm_step(environment: Environment) -> str:
    return f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"


def _by_torch(environment: Environment, launcher: str, prefix: str, restarts: int = 0) -> Launched:
    rank, size = _required(environment, "RANK", launcher), _required(environment, "WORLD_SIZE", launcher)
    meeting = _chosen_meeting(environment)
    if meeting is None:
        raise UserError(
            f"{launcher} started {size} ranks, but MASTER_ADDR or MASTER_PORT is missing: set both, or unset RANK "
            "and WORLD_SIZE if this process is not a rank"
        )
    return Launched(
        launcher,
        rank,
        size,
        _number(environment, "LOCAL_RANK"),
        _number(environment, "LOCAL_WORLD_SIZE", 1),
        ("torch",),
        _rendezvous(environment, rank, size, *meeting, prefix),
        restarts,
    )


def _by_mpi(environment: Environment, launched: Launched) -> Launched:
    """Add a rendezvous without MPI to the ranks of an mpiexec, if variables name one."""
    meeting = _chosen_meeting(environment)
    if meeting is None:
        return launched
    there = _rendezvous(environment, launched.rank, launched.size, *meeting, "hocket")
    return replace(launched, transports=("mpi", "torch"), rendezvous=there)


def _rendezvous(
    environment: Environment, rank: int, size: int, host: str, port: int, prefix: str, job: str = ""
) -> Rendezvous:
    if not rank < size:
        raise UserError(
            f"rank {rank} of {size} in the environment, but ranks are 0 to {size - 1}: correct RANK and WORLD_SIZE, or "
            "unset both"
        )
    of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_agent
    return Rendezvous(rank, size, host, port, prefix, serves, ports_of(environment), lasts=of_agent, job=job)


def ports_of(environment: Environment) -> range | None:
    """Return the ports that HOCKET_PORTS names; None for any."""
    return parse_ports(environment[PORTS_VARIABLE]) if PORTS_VARIABLE in environment else None


def _chosen_meeting(environment: Environment) -> tuple[str, int] | None:
    host = environment.get("MASTER_ADDR")
    if not host or "MASTER_PORT" not in environment:
        return None
    port = _number(environment, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={port} in the environment is not a port: allowed are 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]  # as an address of IPv6 stands before a port
    try:
        if ":" in host:
            ip_address(host.partition("%")[0])
        elif re.search(r"[\s/]", host):
            raise ValueError("a name cannot contain a space or /")
        host.encode("idna")
    except ValueError as error:
        raise UserError(f"MASTER_ADDR={host!r} in the environment is not a host name: {error}") from error
    return host, port


def _slurms_meeting(environment: Environment) -> tuple[str, int]:
    """Return the step's first host, and a port that other steps are unlikely to have."""
    ports = ports_of(environment) or _SLURM_PORTS
    job, step = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _first_host(environment.get("SLURM_STEP_NODELIST", "")), ports[(job + step) % len(ports)]


def _first_host(nodes: str) -> str:
    """Return the first name of Slurm's list, such as `gpu[003-007,12],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    if first is None:
        raise UserError(
            f"SLURM_STEP_NODELIST={nodes!r} in the environment does not name a host: start the ranks by srun, or "
            "unset SLURM's variables"
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


def _tasks_of_node(text: str, node: int) -> int:
    """Return a host's number of ranks from Slurm's list of all, such as `4(x2),3`; 1 if missing."""
    for count, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", text):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return 1


def _required(environment: Environment, name: str, launcher: str) -> int:
    if name not in environment:
        raise UserError(
            f"{launcher} started this process, but {name} is missing in the environment: start all ranks by "
            f"{launcher}, or unset its variables"
        )
    return _number(environment, name)


def _number(environment: Environment, name: str, default: int = 0) -> int:
    value = environment.get(name)
    if value is None:
        return default
    if not _NUMBER.fullmatch(value):
        raise UserError(f"{name}={value!r} in the environment is not a number: correct it, or unset it")
    return int(value)
