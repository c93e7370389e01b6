"""The ranks that the command line asks for: their number, hosts, transport and launcher."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hocket.errors import UserError
from hocket.launch.hosts import Host, are_here, parse_hosts, share_out
from hocket.launch.launching import Starter, launch, usable_mpiexec
from hocket.launch.mpiexec import find_mpiexec
from hocket.launch.own_ranks import OwnRanks, ssh
from hocket.transport.job_folder import job_folder, shared_job_folder

_MASTER_PORT = 29500

#: Signals by which a process ends that was not asked to.
_CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True)
class WantedRanks:
    """The ranks that `-n`, `--hosts`, `--transport` and `--mpi-arg` ask for.

    Attributes:
        ranks: the number of ranks; None for the hosts' places, or for the file's number.
        hosts: the hosts with their places; none for this host.
        transport: `mpi`, `torch` or `virtual`; None for MPI if it is installed, else torch.
        mpi_args: further arguments of mpiexec.
        words: the options `--hosts` and `--mpi-arg` as they were given.
    """

    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    transport: str | None = None
    mpi_args: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls, ranks: int | None, hosts: str | None, transport: str | None, mpi_args: Sequence[str]
    ) -> WantedRanks:
        """Read the options.

        Raises:
            UserError: the hosts or the words for mpiexec are malformed.
        """
        try:
            words = tuple(word for text in mpi_args for word in shlex.split(text))
        except ValueError as error:
            raise UserError(
                f"--mpi-arg {' '.join(mpi_args)}: {error}: quote the options as for a shell"
            ) from error
        given = (*(("--hosts", hosts) if hosts else ()), *(f"--mpi-arg={text}" for text in mpi_args))
        return cls(ranks, parse_hosts(hosts) if hosts else (), transport, words, given)

    @property
    def size(self) -> int | None:
        """The number of ranks; None if neither `-n` nor `--hosts` is given.

        Raises:
            UserError: the hosts have fewer places.
        """
        return sum(host.ranks for host in self._shared()) if self.hosts else self.ranks

    def starter(self, command: Sequence[str]) -> Starter:
        """Return the starter of the ranks.

        Args:
            command: each rank's command, to be named in the error if ranks cannot be started from here.

        Raises:
            UserError: there is no mpiexec, or no way to the hosts; says what to start there.
        """
        hosts = self._shared()
        mpiexec = None
        elsewhere = not are_here(hosts) or len(hosts) > 1
        if self.transport == "mpi":
            mpiexec = find_mpiexec()
        elif self.transport is None and (self.mpi_args or not elsewhere):
            mpiexec = usable_mpiexec()
        if mpiexec is not None:
            if elsewhere and not all(host.name for host in hosts):
                raise UserError("a run needs the hosts' names, such as --hosts a:8,b:8")
            return replace(mpiexec, hosts=hosts if elsewhere else (), arguments=self.mpi_args)
        if self.mpi_args:
            raise UserError("--mpi-arg is for mpiexec, but these ranks use transport torch: leave it out")
        reaches = shutil.which(ssh()[0]) is not None and "SLURM_JOB_ID" not in os.environ
        if elsewhere and not (reaches and all(host.name for host in hosts)):
            lines = "\n".join(_lines(hosts, command))
            raise UserError(f"without ssh or hosts' names, or in a Slurm job, start this yourself:\n{lines}")
        return OwnRanks(hosts if elsewhere else ())

    def _shared(self) -> tuple[Host, ...]:
        return share_out(self.hosts, self.ranks) if self.hosts else ()


def _lines(hosts: Sequence[Host], command: Sequence[str]) -> list[str]:
    """Return the commands that start ranks on other hosts: one in a Slurm job, else one for each host."""
    if "SLURM_JOB_ID" in os.environ:
        ranks = sum(host.ranks for host in hosts)
        return [f"srun --nodes {len(hosts)} --ntasks {ranks} {shlex.join(command)}"]
    program = shlex.join(command[1:] if command[0] == sys.executable else ["--no-python", *command])
    first = hosts[0].name or "FIRST_HOST"
    meeting = f"--master-addr {first} --master-port {_MASTER_PORT}"
    return [
        f"on {host.name or f'host {number}'}: torchrun --nnodes {len(hosts)} --node-rank {number} "
        f"--nproc-per-node {host.ranks} {meeting} {program}"
        for number, host in enumerate(hosts)
    ]


def launch_here(
    starter: Starter,
    ranks: int,
    program: Sequence[str],
    again: Callable[[], str],
    environment: Mapping[str, str] | None = None,
    ready: Callable[[], None] | None = None,
) -> int:
    """Run a program on ranks, with folders that do not outlive them, and return the exit status.

    Args:
        starter: starts the ranks.
        ranks: the number of ranks.
        program: the command of a rank.
        again: returns the advice if a rank was killed.
        environment: variables to add.
        ready: as of `launch`.
    """
    with job_folder(Path(tempfile.gettempdir())) as folder, shared_job_folder() as variables:
        added = {**variables, **(environment or {})}
        status = launch(starter, ranks, program, folder=folder, environment=added, ready=ready)
    if status - 128 in _CRASHES:
        print(f"hocket: {again()}", file=sys.stderr)
    return status
