"""`hocket doctor`: the setup of this machine, and its meaning for runs."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hocket import __version__
from hocket.cli.doctor_folder import shared_folder
from hocket.cli.doctor_network import addresses_of, interfaces_finding
from hocket.cli.doctor_packages import both_mpis, gpu, numba_cache, plugins, torch_build
from hocket.cli.finding import Finding, Verdict
from hocket.errors import UserError
from hocket.installing import how_to_install, installed_version
from hocket.launch.joining import join, launched_rank
from hocket.launch.mpiexec import Mpiexec, find_mpiexec
from hocket.launch.rank_process import home, host_memory
from hocket.transport.job_folder import SEGMENTS_VARIABLE, shared_job_folder
from hocket.transport.meeting.addresses import ipv4_interfaces

_INSTALL_MPI = how_to_install("hocket-core", "mpi")
_QUERY_TIMEOUT_S = 30.0
# Run by a process of its own: MPI starts when it is imported, and a broken one may end the process.
_QUERY_MPI = """
import json, mpi4py
mpi4py.rc.thread_level = "multiple"
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
          MPI.THREAD_MULTIPLE: "multiple"}
print(json.dumps({"mpi4py": mpi4py.__version__, "library": MPI.Get_library_version(),
                  "threads": levels[MPI.Query_thread()]}))
"""
# The variables that a launcher sets for its ranks; the query is none of them.
_LAUNCHERS_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_")


def doctor_command(out: Path | None = None) -> int:
    """Carry out `hocket doctor`, and return the exit status: 1 if there is a problem.

    Args:
        out: a folder for runs, into which all of a launcher's ranks look, while rank 0 alone reports. None for no look.
    """
    problems = 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    findings = examine() if out is None else examine_with_folder(out)
    for finding in findings:
        problems += finding.verdict is Verdict.PROBLEM
        line = f"{finding.verdict.value:<8} {finding.subject:<14} {finding.text}"
        print(textwrap.fill(line, width, subsequent_indent=" " * 24) if width else line, flush=True)
    if problems:
        plural = "s" * (problems != 1)
        print(f"\n{problems} problem{plural}: runs without MPI (--transport torch or virtual) may still work")
    return 1 if problems else 0


def examine() -> Iterator[Finding]:
    """Yield all findings on this machine."""
    yield Finding.ok("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding.ok("hocket-core", __version__)
    yield torch_build()
    yield _cores()
    yield _memory()
    yield shared_memory()
    yield numba_cache()
    name = socket.gethostname()
    yield interfaces_finding(dict(ipv4_interfaces()), name, addresses_of(name))
    yield from both_mpis()
    mpi = query_mpi()
    yield mpi_finding(mpi)
    yield from mpiexec_findings(mpi)
    if os.geteuid() == 0:
        yield Finding.note(
            "user",
            "root: Open MPI's mpiexec refuses to run as root without an option; `hocket run` passes this "
            "option",
        )
    yield gpu()
    yield from plugins()
    yield _drawing("matplotlib", "pictures of runs (metrics.png)")
    yield _drawing("plotly", "pages that comparisons and --report write")


def examine_with_folder(out: Path) -> Iterator[Finding]:
    """Yield the findings on rank 0's machine, if this is its process, and those on a folder for runs; collective."""
    if launched_rank() == 0:
        yield from examine()
    peer = join()
    found = list(shared_folder(peer, out))
    if peer.rank == 0:
        yield from found


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    text = f"{usable} usable"
    if usable < present:
        text += f" of {present} (affinity or a container's limit)"
    meaning = "if there are more ranks, they share these cores, with one thread each"
    return (
        Finding.ok("cores", f"{text}: {meaning}")
        if usable > 1
        else Finding.note("cores", f"{text}: {meaning}")
    )


def _memory() -> Finding:
    total, available = host_memory()
    text = f"{_gib(available)} of {_gib(total)} available; a rank that imports torch takes about 0.25 GiB"
    return (
        Finding.ok("memory", text)
        if available > 1 << 30
        else Finding.note("memory", f"{text}: run few ranks")
    )


def shared_memory() -> Finding:
    """Return whether the ranks of a host can share memory."""
    from hocket.transport.host.memory import why_unshared

    why = why_unshared()
    if why:
        return Finding.note(
            "sharing", f"{why}: ranks of one host send messages instead, which is several times slower"
        )
    return Finding.ok("sharing", "ranks of one host share memory")


def query_mpi(python: str = sys.executable) -> dict[str, str]:
    """Ask mpi4py in a process of its own; return its answer, or the reason for none under `error`."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS_VARIABLES)}
    environment = {**own, **home()}
    try:
        # Open MPI's start of a single process leaves 16 MB where its ranks would share memory.
        with shared_job_folder() as variables:
            if SEGMENTS_VARIABLE in variables:
                environment["OMPI_MCA_btl_sm_backing_directory"] = variables[SEGMENTS_VARIABLE]
            process = subprocess.run(
                [python, "-P", "-c", _QUERY_MPI],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_QUERY_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return {"error": f"MPI did not start within {_QUERY_TIMEOUT_S:g} s"}
    lines = process.stdout.splitlines()
    if process.returncode == 0 and lines:
        answer: dict[str, str] = json.loads(lines[-1])
        return answer
    words = (
        process.stderr.strip() or process.stdout.strip() or f"exit status {process.returncode}"
    ).splitlines()
    return {"error": words[-1]}


def mpi_finding(mpi: dict[str, str]) -> Finding:
    """Return the finding on MPI, from the answer of `query_mpi`."""
    if "error" in mpi:
        if find_spec("mpi4py") is None:
            return Finding.note(
                "mpi", f"mpi4py is not installed, so ranks use transport torch: {_INSTALL_MPI}"
            )
        text = f"mpi4py does not start MPI: {mpi['error']}. Reinstall both: {_INSTALL_MPI}"
        return Finding.problem("mpi", f"{text}; or use --transport torch, which does not need MPI")
    library = _library(mpi["library"])
    text = f"mpi4py {mpi['mpi4py']} over {library}, threads: {mpi['threads']}"
    if mpi["threads"] != "multiple":
        return Finding.problem("mpi", f"{text}: Hocket needs `multiple`; install another MPI: {_INSTALL_MPI}")
    return Finding.ok("mpi", text)


def mpiexec_findings(mpi: dict[str, str]) -> Iterator[Finding]:
    """Yield the finding on mpiexec, and on whether it belongs to mpi4py's MPI."""
    try:
        mpiexec = find_mpiexec()
    except UserError as error:
        yield Finding.note("mpiexec", str(error))
        return
    text = f"{mpiexec.path} ({mpiexec.version})"
    if "error" in mpi:
        yield Finding.note("mpiexec", text)
        return
    yield match(mpiexec, _library(mpi["library"]), text)


def match(mpiexec: Mpiexec, library: str, text: str) -> Finding:
    """Return the comparison of an mpiexec with the MPI library that the ranks would load."""
    vendor = {"Open MPI": "openmpi", "MPICH": "mpich"}.get(library.rpartition(" ")[0])
    number = library.rpartition(" ")[2]
    if vendor != mpiexec.vendor:
        return Finding.problem(
            "mpiexec",
            f"{text} and mpi4py belong to different MPI libraries, so ranks cannot find each other. mpi4py "
            f"uses {library}: install its mpiexec in this Python's environment ({_INSTALL_MPI})",
        )
    if number not in mpiexec.version:
        return Finding.note(
            "mpiexec",
            f"{text} has another version than {library}, which mpi4py uses: such a pair usually works",
        )
    return Finding.ok("mpiexec", f"{text}, of the same MPI")


def _library(text: str) -> str:
    """Return an MPI library's name and version from its own description."""
    for pattern, name in ((r"Open MPI v?([\w.]+)", "Open MPI"), (r"MPICH Version:\s*(\S+)", "MPICH")):
        found = re.search(pattern, text)
        if found:
            return f"{name} {found[1].rstrip(',')}"
    return text.strip("\0\n ").splitlines()[0][:80] if text.strip("\0\n ") else "an unknown MPI"


def _drawing(library: str, what: str) -> Finding:
    found = installed_version(library)
    if found is None:
        return Finding.note(library, f"missing: no {what}; {how_to_install('hocket-core', 'plot')}")
    return Finding.ok(library, f"{found}: {what}")


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
