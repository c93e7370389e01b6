"""tools/netlab: separate hosts, links that carry what they should, and nothing left behind."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1]
NETLAB = str(TOOLS / "netlab")
# What the kernel and this tool leave in places that everybody sees.
PLACES = (Path("/run/netns"), Path("/run/hocket-netlab"), Path("/dev/shm"))


def _reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "netlab needs root"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"netlab needs {' and '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "this root may not make namespaces" if tried.returncode else None


REASON = _reason_to_skip()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))

REDUCE = """
import json, os, socket, sys, time
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
host = world.Split_type(MPI.COMM_TYPE_SHARED)
ours = np.full(int(sys.argv[1]), world.rank + 1, np.float32)
total = np.empty_like(ours)
world.Barrier()
start_s = time.perf_counter()
request = world.Iallreduce(ours, total)
while not request.Test():
    time.sleep(0.0005)
seconds = time.perf_counter() - start_s
found = dict(name=socket.gethostname(), host=os.environ["NETLAB_HOST"], on_host=host.size, seconds=seconds,
             total=[float(total.min()), float(total.max())], threads=os.environ["OMP_NUM_THREADS"])
everybody = world.gather(found)
if world.rank == 0:
    print(json.dumps(everybody))
"""


@pytest.fixture(autouse=True, scope="module")
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be heard by what tests start: whoever runs them in the background of a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def netlab(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [NETLAB, *arguments], capture_output=True, text=True, timeout=100, check=False, env=env
    )


def left(key: str) -> list[Path]:
    """Return what there still is of a lab."""
    return [path for place in PLACES if place.is_dir() for path in place.iterdir() if key in path.name]


def processes(mark: str) -> list[int]:
    """Return the processes with this word in their command line."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in line.read_bytes().split(b"\0"):
                found.append(int(line.parent.name))
    return found


def command_of(number: int) -> str:
    """Return the name of a process's command; nothing where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/comm").read_text().strip()
    return ""


def wait_until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


@contextlib.contextmanager
def running(mark: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a netlab whose command is `sleep MARK`; give its process and the lab's key once that sleeps."""
    process = subprocess.Popen([NETLAB, *arguments, "--", "sleep", mark], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    errors = process.stderr
    try:

        def sleeping() -> bool:
            assert process.poll() is None, errors.read()
            return any(command_of(number) == "sleep" for number in processes(mark))

        wait_until(sleeping)
        lines = netlab("list").stdout.splitlines()
        (line,) = [line for line in lines if line.endswith(f" process {process.pid}")]
        yield process, line.split(":")[0]
    finally:
        process.kill()
        process.wait()
        errors.close()
        netlab("clean")


def reduce(tmp_path: Path, *, hosts: int, ranks: int, floats: int) -> tuple[Any, Any]:
    """Return what the ranks of an allreduce found, and netlab's report."""
    script, report = tmp_path / "reduce.py", tmp_path / "report.json"
    script.write_text(REDUCE)
    done = netlab(
        *("--hosts", str(hosts), "--rate", "100mbit", "run", "-n", str(ranks), "--report", str(report)),
        *("--", sys.executable, str(script), str(floats)),
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "links of 100mbit: exit status 0 after" in done.stderr
    return json.loads(done.stdout), json.loads(report.read_text())


@pytest.mark.alone
@needs_hosts
def test_an_allreduce_between_hosts_takes_the_time_and_the_bytes_that_it_must(tmp_path: Path) -> None:
    floats = 2_500_000
    ranks, report = reduce(tmp_path, hosts=4, ranks=4, floats=floats)

    least_bytes = 2 * 3 / 4 * 4 * floats
    least_s = least_bytes * 8 / 100e6
    for rank in ranks:
        assert rank["total"] == [10, 10]
        # Not faster than the link, and not much slower: headers are 5 %, the rest is the machine's business.
        assert least_s < rank["seconds"] < 2 * least_s
    for host in report["hosts"]:
        # Headers and acknowledgements, and MPI's start.
        assert least_bytes < host["sent"] < 1.1 * least_bytes
        assert least_bytes < host["received"] < 1.1 * least_bytes
    assert sum(host["sent"] for host in report["hosts"]) == pytest.approx(
        sum(host["received"] for host in report["hosts"]), rel=0.01
    )
    assert left(report["lab"]) == []


@needs_hosts
@pytest.mark.parametrize(
    ("hosts", "ranks", "counts"), [(4, 4, [1, 1, 1, 1]), (4, 8, [2, 2, 2, 2]), (2, 3, [2, 1])]
)
def test_mpi_sees_separate_hosts_and_consecutive_ranks_on_each(
    tmp_path: Path, hosts: int, ranks: int, counts: list[int]
) -> None:
    found, report = reduce(tmp_path, hosts=hosts, ranks=ranks, floats=1000)

    expected = [host for host, count in enumerate(counts) for _ in range(count)]
    assert [int(rank["host"]) for rank in found] == expected
    assert [rank["name"] for rank in found] == [f"netlab-{report['lab']}-{host}" for host in expected]
    assert [rank["on_host"] for rank in found] == [counts[host] for host in expected]
    # The cores are shared by all hosts.
    share = max(1, len(os.sched_getaffinity(0)) // ranks)
    assert {rank["threads"] for rank in found} == {str(share)}
    assert left(report["lab"]) == []


@needs_hosts
@pytest.mark.parametrize("action", [("run", "-n", "2"), ("exec", "1")])
def test_the_exit_status_is_the_commands(action: tuple[str, ...]) -> None:
    assert netlab(*action, "--", "sh", "-c", "exit 7").returncode == 7


@needs_hosts
def test_a_command_that_sends_nothing_more_is_ended_with_a_line() -> None:
    done = netlab("run", "--limit", "2", "--", "sleep", "90")
    assert done.returncode == 124, done.stderr
    assert "netlab: no byte has crossed a link for 2 s: the command was killed" in done.stderr


@needs_hosts
@pytest.mark.parametrize("action", [("run", "-n", "4"), ("exec", "0")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_lab_leaves_nothing(action: tuple[str, ...], number: signal.Signals) -> None:
    mark = f"{600 + number}.{os.getpid()}"
    with running(mark, *action) as (process, key):
        assert left(key)
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert left(key) == []
        assert processes(mark) == []


# Any other lab that starts would remove it first.
@pytest.mark.alone
@needs_hosts
@pytest.mark.parametrize("action", [("run", "-n", "4"), ("exec", "0")])
def test_what_a_killed_lab_has_left_is_removed_and_a_living_one_stays(action: tuple[str, ...]) -> None:
    mine, other = f"700.{os.getpid()}", f"800.{os.getpid()}"
    with running(other, "exec", "0") as (neighbour, living):
        before = left(living)
        with running(mine, *action) as (process, key):
            process.kill()
            process.wait()
            assert left(key)
            assert netlab("clean").stdout == f"removed lab {key} of process {process.pid}\n"
            assert left(key) == []
            assert processes(mine) == []
        assert neighbour.poll() is None
        assert processes(other)
        assert left(living) == before


@pytest.mark.alone
@needs_hosts
def test_the_next_start_removes_what_a_killed_lab_has_left() -> None:
    with running(f"900.{os.getpid()}", "exec", "0") as (process, key):
        process.kill()
        process.wait()
        assert left(key)
        assert netlab("exec", "0", "--", "true").returncode == 0
        assert left(key) == []


@needs_hosts
def test_commands_meet_in_a_running_lab_and_hosts_share_no_memory_files() -> None:
    with running(f"1000.{os.getpid()}", "--hosts", "3", "exec", "0") as (_, key):
        serve = "import socket; s = socket.create_server(('0.0.0.0', 5001)); print(s.accept()[1][0])"
        server = subprocess.Popen(
            [NETLAB, "--lab", key, "exec", "1", "--", sys.executable, "-c", serve],
            stdout=subprocess.PIPE,
            text=True,
        )
        call = (
            "import socket, time\n"
            "for _ in range(100):\n"
            "    try: socket.create_connection(('host1', 5001)); break\n"
            "    except ConnectionRefusedError: time.sleep(0.1)\n"
        )
        assert netlab("--lab", key, "exec", "2", "--", sys.executable, "-c", call).returncode == 0
        assert server.communicate(timeout=20)[0] == "10.77.0.3\n"

        assert netlab("--lab", key, "exec", "1", "--", "touch", "/dev/shm/x").returncode == 0
        assert netlab("--lab", key, "exec", "1", "--", "ls", "/dev/shm").stdout == "x\n"
        assert netlab("--lab", key, "exec", "2", "--", "ls", "/dev/shm").stdout == ""
        # From inside a host, as in its shell.
        nested = netlab(
            "--lab", key, "exec", "2", "--", NETLAB, "--lab", key, "exec", "1", "--", "ls", "/dev/shm"
        )
        assert nested.stdout == "x\n"

        missing = netlab("--lab", key, "exec", "3", "--", "true")
        assert missing.returncode == 2
        assert "no host 3: the lab's are 0 to 2" in missing.stderr


@needs_hosts
def test_a_lab_that_is_not_there_is_refused() -> None:
    refused = netlab("--lab", "none", "exec", "0", "--", "true")
    assert refused.returncode == 2
    assert refused.stderr.startswith("netlab: no lab none; there are: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--latency", "1ms", "run", "--", "true"],
            "there is no --latency: it takes the kernel's netem queue",
        ),
        (["--rate", "fast", "run", "--", "true"], "'fast' is no rate: write it like 100mbit"),
        (["--hosts", "0", "run", "--", "true"], "--hosts must be 1 to 250"),
        (["run", "-n", "2", "true"], "write `--` and then the command"),
        (["run", "-n", "2", "--"], "write `--` and then the command"),
        (["shell", "0", "--", "true"], "only run and exec take a command"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    refused = netlab(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_what_is_missing_is_said_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    system = importlib.import_module("netlab_lab.system")
    cli = importlib.import_module("netlab_lab.cli")
    monkeypatch.setattr(system.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(system.shutil, "which", lambda program: None if program in ("ip", "tc") else program)
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)

    assert cli.main(["run", "--", "true"]) == 2
    assert capsys.readouterr().err == (
        "netlab: needs root (it makes network namespaces): start it with sudo; "
        "needs ip and tc: apt-get install iproute2\n"
    )


def test_ranks_are_spread_block_wise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    mpi = importlib.import_module("netlab_lab.mpi")
    assert mpi.ranks_per_host(8, 4) == [2, 2, 2, 2]
    assert mpi.ranks_per_host(6, 4) == [2, 2, 1, 1]
    assert mpi.ranks_per_host(1, 4) == [1, 0, 0, 0]


def test_ranks_that_are_to_meet_by_the_environment_see_nothing_of_mpiexec() -> None:
    told = 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT, $(env | grep -cE "^(OMPI|PMIX|PRTE)_")"'
    done = netlab("run", "--env", "--", "sh", "-c", told)
    assert sorted(done.stdout.splitlines()) == ["0 of 2 at host0:29500, 0", "1 of 2 at host0:29500, 0"]
