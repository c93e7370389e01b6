"""Ranks that this process starts itself, without mpiexec: what they are given, and how they are ended."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.errors import UserError
from hocket.launch.hosts import Host
from hocket.launch.launching import launch
from hocket.launch.own_ranks import OwnRanks
from hocket.transport.job_notes import processes_of
from hocket.transport.launchers import find_launched

#: Ranks that do something by their number, in the folder of the job.
BEGIN = "import json, os, signal, sys, time; rank = int(os.environ['RANK']); "
SLEEP = "time.sleep(600)"
JOIN = "from hocket.transport.job_notes import note_pid; note_pid(rank); "
#: A process that launches such a program: FOLDER PROGRAM...
FORKING_JOB = """
import pathlib, sys
from hocket.launch.launching import launch
from hocket.launch.own_ranks import OwnRanks
sys.exit(launch(OwnRanks(), 3, sys.argv[2:], folder=pathlib.Path(sys.argv[1]), ready=lambda: None))
"""
#: A program that has its ranks forked.
FORK = "from hocket.launch.forking import in_each_rank; in_each_rank(lambda: None); "


@pytest.fixture(params=[False, True], ids=["each by itself", "forked"])
def run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a program on ranks and returns exit status, output and errors."""

    def run_ranks(ranks: int, program: str, **environment: str) -> tuple[int, str, str]:
        forks = request.param
        command = [sys.executable, "-c", (FORK if forks else "") + BEGIN + program]
        status = launch(
            OwnRanks(),
            ranks,
            command,
            folder=tmp_path,
            environment=environment,
            ready=(lambda: None) if forks else None,
        )
        told = capfd.readouterr()
        assert processes_of(tmp_path) == []
        return status, told.out, told.err

    return run_ranks


def test_ranks_find_one_another(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a torchrun that has started this process")
    status, out, err = run(3, f"{JOIN}print(json.dumps(dict(os.environ)), flush=True)", MORE="more")
    assert (status, err) == (0, "")
    launched = [find_launched(json.loads(line)) for line in out.splitlines()]
    assert sorted((found.rank, found.local_rank) for found in launched if found) == [(0, 0), (1, 1), (2, 2)]
    meetings = {
        (found.rendezvous.host, found.rendezvous.port) for found in launched if found and found.rendezvous
    }
    assert len(meetings) == 1
    assert json.loads(out.splitlines()[0])["MORE"] == "more"


def test_a_rank_that_ends_with_an_error_ends_the_others(run: Callable[..., tuple[int, str, str]]) -> None:
    begun_s = time.monotonic()
    status, _, err = run(3, f"rank == 1 and sys.exit(3); {SLEEP}")
    assert (status, err) == (3, "hocket: rank 1 ended with exit code 3; all ranks were ended\n")
    assert time.monotonic() - begun_s < 10


def test_ranks_that_join_nothing_end_when_they_like(run: Callable[..., tuple[int, str, str]]) -> None:
    line = "no rank has called hocket.attach or hocket.join, so each of these 3 processes has run the script alone"
    assert run(3, "rank == 1 and time.sleep(2)") == (0, "", f"hocket: {line}\n")


def test_a_rank_that_has_told_why_has_the_last_word(run: Callable[..., tuple[int, str, str]]) -> None:
    told = "print('hocket: rank 1 at step 2: out of data; all ranks end', file=sys.stderr); "
    ending = f"from hocket.transport.job_notes import note_ending; note_ending(5); {told} os._exit(5)"
    status, _, err = run(2, f"{JOIN}exec({ending!r}) if rank else {SLEEP}")
    assert (status, err) == (5, "hocket: rank 1 at step 2: out of data; all ranks end\n")


def test_a_mistake_beside_a_process_group_of_torch_is_told(run: Callable[..., tuple[int, str, str]]) -> None:
    """Torch's own hook of uncaught exceptions holds back what is written to `sys.stderr` meanwhile."""
    program = (
        "import torch; torch.distributed.init_process_group('gloo'); import hocket; hocket.compose('agdd')"
    )
    status, _, err = run(2, program)
    assert status == 2
    assert err.startswith("hocket: rank 0: there is no recipe 'agdd'")
    assert err.count("\n") == 1


def test_a_killed_rank_is_named_and_those_that_do_not_notice_are_ended(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    status, _, err = run(3, f"rank == 2 and os.kill(os.getpid(), signal.SIGKILL); {SLEEP}")
    assert err.startswith("hocket: rank 2 on ")
    assert err.endswith(
        " was killed by SIGKILL (out of memory? see the kernel's log); all ranks were ended\n"
    )
    assert status == 137


def test_the_others_may_say_where_they_noticed_that_a_rank_was_killed(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    noticed = "hocket: at step 7, rank 0: control (barrier): rank 1 has died; all ranks end"
    program = (
        f"{JOIN}exec(\"while len([n for n in os.listdir(os.environ['HOCKET_PID_FOLDER']) if n.isdigit()]) < 2:"
        ' time.sleep(0.01)"); rank == 1 and os.kill(os.getpid(), signal.SIGKILL); time.sleep(0.5);'
        f"print({noticed!r}, file=sys.stderr); sys.exit(1)"
    )
    status, _, err = run(2, program)
    assert err.startswith("hocket: at step 7, rank 0: control (barrier): rank 1 has died; rank 1 on ")
    assert status == 137


def test_neither_a_stopped_rank_nor_one_that_heeds_no_signal_outlives_the_job(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    act = f"[{ignore}, {SLEEP}] if rank == 0 else {stop} if rank == 1 else [time.sleep(1), sys.exit(4)]"
    status, _, err = run(3, act)
    assert (status, err) == (4, "hocket: rank 2 ended with exit code 4; all ranks were ended\n")


def test_what_is_loaded_before_ranks_are_forked_is_loaded_once_and_after_the_launcher_is_ready(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ready = tmp_path / "ready"
    program = (
        "import json, os; from hocket.launch.forking import in_each_rank; import numpy as np;"
        f"loaded = in_each_rank(lambda: [os.getpid(), os.path.exists({str(ready)!r})]);"
        "print(json.dumps([loaded, os.getppid(), os.getpid() == os.getpgid(0), np.random.random()]), flush=True)"
    )
    command = [sys.executable, "-c", program]
    assert launch(OwnRanks(), 3, command, folder=tmp_path, ready=ready.touch) == 0
    [*of_ranks] = map(json.loads, capfd.readouterr().out.splitlines())
    assert len(of_ranks) == 3
    [(_, was_ready)] = {tuple(loaded) for loaded, *_ in of_ranks}
    assert was_ready
    assert all((parent, leads) == (os.getpid(), True) for _, parent, leads, _ in of_ranks)
    assert len({drawn for *_, drawn in of_ranks}) == 3


def test_ranks_that_cannot_be_forked_say_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('no such module', file=sys.stderr); sys.exit(3)"
    command = [sys.executable, "-c", program]
    assert launch(OwnRanks(), 2, command, folder=tmp_path, ready=lambda: time.sleep(0.5)) == 3
    said = "no such module\nhocket: rank 0 ended with exit code 3; all ranks were ended\n"
    assert capfd.readouterr().err == said


def test_a_launcher_that_refuses_the_run_leaves_nobody(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("no such task")

    command = [sys.executable, "-c", f"{FORK}import time; {SLEEP}"]
    with pytest.raises(UserError, match="no such task"):
        launch(OwnRanks(), 2, command, folder=tmp_path, ready=refuse)
    assert processes_of(tmp_path) == []


def test_a_program_that_does_not_start_leaves_nobody(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        launch(OwnRanks(), 2, [str(tmp_path / "nothing")], folder=tmp_path)


@pytest.mark.parametrize("forks", [False, True], ids=["each by itself", "forked"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_who_started_them_ends_all(number: signal.Signals, forks: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    note = f"open(os.path.join({str(tmp_path)!r}, 'pid-' + str(os.getpid())), 'w').close()"
    script.write_text(f"{FORK if forks else ''}{BEGIN}{note}; {SLEEP}")
    hocket = [sys.executable, "-m", "hocket", "launch", "--transport", "torch", "-n", "3", str(script)]
    if forks:
        (tmp_path / "job").mkdir()
        hocket = [sys.executable, "-c", FORKING_JOB, str(tmp_path / "job"), sys.executable, str(script)]
    job = subprocess.Popen(hocket, stderr=subprocess.PIPE, text=True)

    def pids() -> list[int]:
        return [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]

    try:
        _wait_for(lambda: len(pids()) == 3 and _handles(job.pid, signal.SIGTERM))
        job.send_signal(number)
        _, err = job.communicate(timeout=30)
        if number is not signal.SIGKILL:
            assert (job.returncode, err) == (128 + number, f"hocket: {number.name}: all ranks were ended\n")
        _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids()))
    finally:
        for pid in [job.pid, *pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _handles(process: int, number: signal.Signals) -> bool:
    """Return whether a process handles a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << (number - 1))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


#: A stand-in for ssh, which runs the command on this host: it leaves out its options and the host's name.
SSH = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[-1]])"

#: Addresses of this host that are none of its names.
HOSTS = (Host("127.0.0.2", 2), Host("127.0.0.3", 1))


@pytest.fixture
def run_far(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a program on ranks of two other hosts."""
    monkeypatch.setenv("HOCKET_SSH", shlex.join([sys.executable, "-c", SSH]))

    def run_ranks(program: str, **environment: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", BEGIN + program]
        status = launch(OwnRanks(HOSTS), 3, command, folder=tmp_path, environment=environment)
        shown = capfd.readouterr()
        return status, shown.out, shown.err

    return run_ranks


def test_ranks_of_other_hosts_find_one_another(
    run_far: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"HOCKET_OF_A_TEST": 'it\'s "here"', "OF_NOBODY": "stays"}
    status, out, err = run_far("print(json.dumps([os.getcwd(), dict(os.environ)]), flush=True)", **given)
    assert (status, err) == (0, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert {folder for folder, _ in found} == {str(tmp_path)}
    launched = [find_launched(variables) for _, variables in found]
    ranks = sorted((each.rank, each.local_rank, each.local_size) for each in launched if each)
    assert ranks == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    places = {(each.rendezvous.host, each.rendezvous.port) for each in launched if each and each.rendezvous}
    assert [host for host, _ in places] == ["127.0.0.2"]
    assert {variables["HOCKET_OF_A_TEST"] for _, variables in found} == {'it\'s "here"'}


def test_a_rank_of_another_host_that_fails_ends_the_others(
    run_far: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    note = f"open({str(tmp_path)!r} + f'/pid-{{rank}}', 'w').write(str(os.getpid()))"
    status, _, err = run_far(f"{note}; rank == 2 and [time.sleep(1), sys.exit(3)]; {SLEEP}")
    assert (status, err) == (3, "hocket: rank 2 ended with exit code 3; all ranks were ended\n")
    for path in tmp_path.glob("pid-*"):
        await_end(int(path.read_text()))


def test_a_killed_rank_of_another_host_is_named_with_its_host(
    run_far: Callable[..., tuple[int, str, str]],
) -> None:
    status, _, err = run_far(f"rank == 1 and os.kill(os.getpid(), signal.SIGKILL); {SLEEP}")
    assert err.startswith("hocket: rank 1 on 127.0.0.2 was killed by SIGKILL")
    assert status == 137


def test_a_signal_for_all_ranks_reaches_those_of_other_hosts(
    run_far: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """SIGTERM to the starter asks ranks to save and end, by SIGUSR1."""
    ends = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))"
    note = f"folder = pathlib.Path({str(tmp_path)!r}); (folder / f'ready-{{rank}}').touch()"
    wait = "[time.sleep(0.02) for _ in iter(lambda: len(list(folder.glob('ready-*'))), 3)]"
    ask = f"rank == 0 and [{wait}, os.kill({os.getpid()}, signal.SIGTERM)]"
    status, _, err = run_far(f"import pathlib; {ends}; {note}; {ask}; {SLEEP}")
    assert (status, err) == (0, "")


def test_a_host_that_cannot_be_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "ssh: connect to host 127.0.0.2 port 22: Connection refused"
    program = f"import sys; print({said!r}, file=sys.stderr); sys.exit(255)"
    monkeypatch.setenv("HOCKET_SSH", shlex.join([sys.executable, "-c", program]))
    assert launch(OwnRanks(HOSTS), 3, ["true"], folder=tmp_path) == 255
    shown = capfd.readouterr().err
    assert said in shown
    assert "reachable without a password: `ssh 127.0.0.3 true`" in shown


def await_end(process: int) -> None:
    """Wait until a process has ended.

    Raises:
        AssertionError: it has not, after ten seconds.
    """
    for _ in range(1000):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} has not ended")
