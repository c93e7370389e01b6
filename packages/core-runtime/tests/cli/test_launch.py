"""`hocket launch`: a user's own script on ranks, here and elsewhere, and what is answered where that cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.cli import wanted_ranks
from hocket.cli.main import main
from hocket.cli.wanted_ranks import WantedRanks
from hocket.errors import UserError
from hocket.launch.mpiexec import Mpiexec
from hocket.launch.own_ranks import OwnRanks

MPIEXEC = Mpiexec("/mpiexec", "openmpi", "mpiexec (Open MPI) 5.0.11")
MPICH = Mpiexec("/mpiexec", "mpich", "MPICH 5.0.2")
PYTHON = sys.executable


@pytest.fixture
def with_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted_ranks, "usable_mpiexec", lambda: MPIEXEC)
    monkeypatch.setattr(wanted_ranks, "find_mpiexec", lambda: MPIEXEC)


@pytest.fixture
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted_ranks, "usable_mpiexec", lambda: None)


def refused(*args: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["hocket", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    return shown.err


@pytest.mark.usefixtures("with_mpi")
def test_mpi_starts_ranks_where_it_is_installed_unless_torch_is_asked_for() -> None:
    assert WantedRanks.of(2, None, None, []).starter([PYTHON, "a.py"]) == MPIEXEC
    assert isinstance(WantedRanks.of(2, None, "torch", []).starter([PYTHON, "a.py"]), OwnRanks)


@pytest.mark.usefixtures("with_mpi")
def test_hosts_and_options_come_to_mpiexec() -> None:
    wanted = WantedRanks.of(5, "a:4,b:4", None, ["--mca btl_tcp_if_include eth1", "--tag-output"])
    assert wanted.size == 5
    starter = wanted.starter([PYTHON, "a.py"])
    assert isinstance(starter, Mpiexec)
    command = starter.command(5, ["x"], forwarded=["A", "B"])
    assert command[command.index("--host") :] == [
        *("--host", "a:4,b:1", "--map-by", "slot", "-x", "A", "-x", "B"),
        *("--mca", "btl_tcp_if_include", "eth1", "--tag-output", "-n", "5", "x"),
    ]
    mpich = Mpiexec("/mpiexec", "mpich", "MPICH 5.0.2", hosts=starter.hosts).command(5, ["x"])
    assert mpich == ["/mpiexec", "-bind-to", "none", "-hosts", "a:4,b:1", "-n", "5", "x"]


@pytest.mark.usefixtures("with_mpi")
@pytest.mark.parametrize("hosts", ["localhost:3", "1x3"])
def test_hosts_that_are_this_one_are_no_others(hosts: str) -> None:
    wanted = WantedRanks.of(None, hosts, None, [])
    assert (wanted.size, wanted.starter([PYTHON, "a.py"])) == (3, MPIEXEC)


@pytest.mark.usefixtures("with_mpi")
def test_mpiexec_needs_names() -> None:
    with pytest.raises(UserError, match=r"^a run needs the hosts' names, such as --hosts a:8,b:8$"):
        WantedRanks.of(None, "2x8", "mpi", []).starter([PYTHON, "a.py"])


@pytest.mark.usefixtures("with_mpi")
def test_between_hosts_ranks_meet_over_torch_unless_mpi_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("HOCKET_SSH", PYTHON)
    wanted = WantedRanks.of(5, "a:4,b:4", None, [])
    starter = wanted.starter([PYTHON, "a.py"])
    assert starter == OwnRanks(starter.hosts)
    assert [str(host) for host in starter.hosts] == ["a:4", "b:1"]
    by_mpi = WantedRanks.of(5, "a:4,b:4", "mpi", []).starter([PYTHON, "a.py"])
    assert isinstance(by_mpi, Mpiexec)
    assert by_mpi.hosts == starter.hosts


@pytest.mark.usefixtures("without_mpi")
def test_other_hosts_without_ssh_get_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("HOCKET_SSH", "no-such-ssh")
    Path("a.py").touch()
    launch = ("launch", "--hosts", "a:4,b:2", "a.py", "--name", "x y")
    told = refused(*launch, monkeypatch=monkeypatch, capfd=capfd)
    meeting = "--master-addr a --master-port 29500"
    assert told.splitlines() == [
        "hocket: without ssh or hosts' names, or in a Slurm job, start this yourself:",
        f"on a: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 {meeting} a.py --name 'x y'",
        f"on b: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 {meeting} a.py --name 'x y'",
    ]
    told = refused(
        *("run", "sgd", "epochs=1", "--trace", "--hosts", "2x1"), monkeypatch=monkeypatch, capfd=capfd
    )
    assert told.splitlines()[1] == (
        "on host 0: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr FIRST_HOST --master-port "
        "29500 -m hocket run sgd epochs=1 --trace"
    )
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    told = refused(*launch, monkeypatch=monkeypatch, capfd=capfd)
    assert told.splitlines()[1] == f"srun --nodes 2 --ntasks 6 {PYTHON} a.py --name 'x y'"


@pytest.mark.usefixtures("without_mpi")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.py"], "hocket: the number of ranks is missing: give -n 4, or --hosts a:4,b:4"),
        (["-n", "2", "b.py"], "hocket: there is no file b.py"),
        (["-n", "2", "no-such-program"], "hocket: there is no program no-such-program; give a script whose"),
        (
            ["-n", "2", "--mpi-arg", "-v", "a.py"],
            "hocket: --mpi-arg is for mpiexec, but these ranks use transport",
        ),
        (
            ["-n", "9", "--hosts", "a:4,b:4", "a.py"],
            "hocket: -n 9, but the hosts have slots for only 8 ranks",
        ),
        (
            ["--hosts", "./none", "a.py"],
            "hocket: hosts './none': './none' is not a host, and there is no such file",
        ),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    args: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    [told] = refused("launch", *args, monkeypatch=monkeypatch, capfd=capfd).splitlines()
    assert told.startswith(message)


def test_a_rank_launches_no_ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    told = refused("launch", "-n", "2", "a.py", monkeypatch=monkeypatch, capfd=capfd)
    assert told == (
        "hocket: Open MPI's mpiexec already started this process as one of 4 ranks: start a.py directly, "
        "without `hocket launch`\n"
    )


def test_virtual_ranks_are_on_no_hosts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = refused(
        *("run", "sgd", "--transport", "virtual", "--hosts", "a:2"), monkeypatch=monkeypatch, capfd=capfd
    )
    assert told.startswith("hocket: virtual ranks are threads of one process: leave out --hosts")


SCRIPT = r"""
import os, signal, sys
import hocket
peer = hocket.join()
os.write(1, f"rank {peer.rank} of {peer.size} over {peer.transport}: {sys.argv[1:]}\n".encode())
peer.allgather_bytes(b"")
if "--die" in sys.argv and peer.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
peer.allgather_bytes(b"")
"""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("torch.utils.data.DistributedSampler([1, 2])", marks=pytest.mark.full),
        "torch.distributed.init_process_group('gloo')",
    ],
)
@pytest.mark.mpi
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_who_looks_for_torchs_process_group_is_told_what_to_use(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch.utils.data.distributed\n{line}\n")
    hocket = [PYTHON, "-m", "hocket", "launch", "-n", "2", "--transport", "mpi", "train.py"]
    ended = subprocess.run(hocket, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    last = ended.stderr.strip("\0\n").splitlines()[-1]
    assert last.startswith(
        "hocket: the script uses torch.distributed's process group, which Hocket does not need"
    )
    assert "use hocket.attach instead of init_process_group" in last


@pytest.mark.mpi
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_many_ranks_of_a_host_start_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from hocket.transport.job_notes import note_pid; note_pid(0)")
    hocket = [PYTHON, "-m", "hocket", "launch", "-n", "33", "--transport", "mpi", "train.py"]
    ended = subprocess.run(hocket, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "transport",
    [
        "torch",
        pytest.param(
            "mpi",
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
            ],
        ),
    ],
)
def test_a_script_gets_its_ranks_and_arguments_and_a_dead_rank_is_named(
    transport: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hocket = [PYTHON, "-m", "hocket", "launch", "-n", "2", "--transport", transport, "train.py"]

    def launch(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*hocket, *args],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    ended = launch("-n", "7", "--lr=0.1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.split("\n")) == [
        "",
        *(f"rank {rank} of 2 over {transport}: ['-n', '7', '--lr=0.1']" for rank in range(2)),
    ]
    ended = launch("--die")
    message, advice = ended.stderr.strip("\0\n").splitlines()
    assert advice.startswith(
        "hocket: run the same command again; a script continues from its last checkpoint if it loads one, with"
    )
    assert message.startswith("hocket: at step 0, rank 0: control (allgather): rank 1 has died; rank 1 on ")
    assert "was killed by SIGKILL" in message
    assert ended.returncode == 128 + signal.SIGKILL
