"""Open MPI's mpiexec over the hosts of a lab."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from netlab_lab.lab import Lab
from netlab_lab.system import NetlabError

_REPOSITORY = Path(__file__).resolve().parents[2]

# What PyTorch's documentation takes for MASTER_PORT; each lab has it to itself.
_BY_ENVIRONMENT = """
export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE" MASTER_ADDR=host0 MASTER_PORT=29500
for name in $(env | grep -oE '^(OMPI|PMIX|PRTE)_[A-Za-z0-9_]*'); do unset "$name"; done
exec "$@"
"""


def find_mpiexec() -> str:
    """Return the mpiexec of this repository's `.venv`, or else the first on PATH.

    Raises:
        NetlabError: there is none, or it is not Open MPI's.
    """
    own = _REPOSITORY / ".venv/bin/mpiexec"
    path = str(own) if own.exists() else shutil.which("mpiexec")
    if path is None:
        raise NetlabError("no mpiexec found: tools/setup installs one into .venv")
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if "Open MPI" not in version.stdout:
        raise NetlabError(f"{path} is not Open MPI's, whose daemons netlab can start: see `exec` for others")
    return path


def ranks_per_host(ranks: int, hosts: int) -> list[int]:
    """Return how many ranks each host gets: consecutive ones, as even as can be, the first hosts one more."""
    share, rest = divmod(ranks, hosts)
    return [share + (host < rest) for host in range(hosts)]


def by_environment(command: list[str]) -> list[str]:
    """Return a rank's command that sees the variables of torch's env:// in place of mpiexec's."""
    return ["sh", "-c", _BY_ENVIRONMENT, "sh", *command]


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
