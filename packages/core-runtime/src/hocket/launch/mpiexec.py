"""The installed mpiexec: its vendor and its command line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.launch.hosts import Host
from hocket.launch.job_output import Report
from hocket.launch.rank_process import end_with_parent, forwarded, home

_FIRST_WITH_ULFM = 5
# A user's own choice of where Open MPI's files go: it takes no second one.
_EVERYBODYS_FOLDER = "PRTE_MCA_prte_tmpdir_base"
_OWN_FILES = "launcher"


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec with its vendor.

    Attributes:
        path: the program.
        vendor: `openmpi` or `mpich`.
        version: its own first line.
        hosts: the hosts of its ranks, with their numbers; none for this host.
        arguments: more of its options, as the user gives them.
    """

    transport: ClassVar[str] = "mpi"

    path: str
    vendor: str
    version: str
    hosts: tuple[Host, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def notifies_of_deaths(self) -> bool:
        """Tell whether it can leave the other ranks alive and notify them when one has died: Open MPI 5's ULFM."""
        version = re.search(r"(\d+)\.\d+", self.version)
        return self.vendor == "openmpi" and version is not None and int(version[1]) >= _FIRST_WITH_ULFM

    def command(
        self,
        ranks: int,
        program: Sequence[str],
        *,
        folder: Path | None = None,
        outliving: bool = False,
        forwarded: Iterable[str] = (),
    ) -> list[str]:
        """Return the command that starts `ranks` ranks of `program`, even more than there are cores.

        Args:
            ranks: how many.
            program: the command of one rank.
            folder: for the launcher's own files, if it has any; its default is the system's temporary folder. Open MPI
                names them by its process number alone, leaves them there when it is killed, and does not start if it
                finds some ("listener thread failed to start"), as numbers are used again.
            outliving: whether to leave the other ranks alive when one has died, if the launcher can notify them. It
                then prints more than a reader wants, in lines that `JobOutput` removes.
            forwarded: variables that ranks of other hosts get, too.
        """
        if self.vendor == "openmpi":
            # Ranks are not bound to cores: a rank's threads would all share its one.
            options = ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
            if folder is not None and _EVERYBODYS_FOLDER not in os.environ:
                options += ["--prtemca", "prte_local_tmpdir_base", str(folder)]
            if outliving and self.notifies_of_deaths:
                # Silent about what a rank died of, unless asked; not silent about threads that start 33 ranks and more.
                settings = {"odls_base_verbose": 5, "errmgr_base_verbose": 5, "odls_base_num_threads": 0}
                options += ["--with-ft", "ulfm"]
                options += [word for name in settings for word in ("--prtemca", name, str(settings[name]))]
            if self.hosts:
                options += ["--host", ",".join(map(str, self.hosts)), "--map-by", "slot"]
                options += [word for name in forwarded for word in ("-x", name)]
        else:
            options = ["-bind-to", "none"]
            options += ["-hosts", ",".join(map(str, self.hosts))] if self.hosts else []
        return [self.path, *options, *self.arguments, "-n", str(ranks), *program]

    def start(
        self,
        ranks: int,
        program: Sequence[str],
        variables: Mapping[str, str],
        report: Report,
        ready: Callable[[], None] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start `ranks` ranks of `program`, with these environment variables.

        Args:
            ranks: how many.
            program: the command of one rank.
            variables: all of them.
            report: of the job, with the folder of its files.
            ready: called first.
        """
        if ready is not None:
            ready()
        # In a process group of its own: a terminal's Ctrl-C goes to who has started the job, and is passed on once.
        return subprocess.Popen(
            self.command(
                ranks,
                program,
                folder=report.folder / _OWN_FILES,
                outliving=True,
                forwarded=forwarded(variables),
            ),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509 (it takes no lock)
        )


def find_mpiexec() -> Mpiexec:
    """Return the mpiexec beside this Python, or else the first on PATH.

    Raises:
        UserError: there is none, or it is neither Open MPI's nor MPICH's.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise UserError(
            f"no mpiexec found: {how_to_install('hocket-core', 'mpi')} installs one, or use --transport torch or "
            "virtual, which do not need it"
        )
    answer = subprocess.run(
        [path, "--version"], env={**os.environ, **home()}, capture_output=True, text=True, check=False
    )
    text = (answer.stdout + answer.stderr).strip()
    if "Open MPI" in text or "prterun" in text or "PRRTE" in text:
        return Mpiexec(path, "openmpi", text.splitlines()[0])
    if "HYDRA" in text:
        version = re.search(r"Version:\s*(\S+)", text)
        return Mpiexec(path, "mpich", f"MPICH {version.group(1) if version else ''}".strip())
    raise UserError(
        f"{path} is neither Open MPI's nor MPICH's mpiexec ({text.splitlines()[0] if text else 'it printed nothing'}): "
        "install one of them, or use --transport torch"
    )
