"""Open MPI's mpiexec over the hosts of a lab."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from netlab_lab.lab import Lab
from netlab_lab.system import NetlabError

__all__ = ["find_mpiexec", "mpiexec_command", "ranks_per_host"]

_REPOSITORY = Path(__file__).resolve().parents[2]


def find_mpiexec() -> str:
    """Return the mpiexec of this repository's `.venv`, or else the first on PATH.

    Raises:
        NetlabError: there is none, or it is not Open MPI's.
    """
    own = _REPOSITORY / ".venv/bin/mpiexec"
    path = str(own) if own.exists() else shutil.which("mpiexec")
    if path is None:
        raise NetlabError("no mpiexec found: tools/setup installs one into .venv")
    told = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if "Open MPI" not in told.stdout:
        raise NetlabError(f"{path} is not Open MPI's, whose daemons netlab can start: see `exec` for others")
    return path


def ranks_per_host(ranks: int, hosts: int) -> list[int]:
    """Return how many ranks each host gets: consecutive ones, as even as can be, the first hosts one more."""
    share, rest = divmod(ranks, hosts)
    return [share + (host < rest) for host in range(hosts)]


def mpiexec_command(mpiexec: str, lab: Lab, ranks: int, options: list[str], command: list[str]) -> list[str]:
    """Return the command that starts ranks over the lab's hosts when it runs inside host 0."""
    places = [
        f"{lab.hostname(host)}:{count}"
        for host, count in enumerate(ranks_per_host(ranks, lab.hosts))
        if count
    ]
    return [
        *(mpiexec, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        # Session folders are removed with the lab.
        *("--prtemca", "prte_tmpdir_base", str(lab.folder), *options),
        *("--host", ",".join(places), "--map-by", "slot", "-n", str(ranks), *command),
    ]
