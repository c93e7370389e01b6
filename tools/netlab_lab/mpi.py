"""Open MPI's mpiexec over the hosts of a lab."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from netlab_lab.lab import Lab
from netlab_lab.links import NETWORK
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
    settings = {
        # Daemons are started by entering a host instead of by ssh, all from here, and reach one another by
        # the lab's network. Their session folders are removed with the lab.
        "--prtemca": {
            "plm_ssh_agent": lab.agent,
            "plm_ssh_no_tree_spawn": "1",
            "prte_if_include": NETWORK,
            "prte_tmpdir_base": str(lab.folder),
        },
        # Memory within a host, TCP between hosts, and nothing that would know that all is one machine.
        "--mca": {"pml": "ob1", "btl": "self,sm,tcp", "btl_tcp_if_include": NETWORK},
    }
    told = [
        word
        for kind, values in settings.items()
        for name, value in values.items()
        for word in (kind, name, value)
    ]
    return [
        *(mpiexec, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *told, *options),
        *("--host", ",".join(places), "--map-by", "slot", "-n", str(ranks), *command),
    ]
