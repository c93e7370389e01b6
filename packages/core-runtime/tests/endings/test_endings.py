"""However a rank ends, the job ends soon, with one message that names the rank, and leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hocket.launch.mpiexec import find_mpiexec

if TYPE_CHECKING:
    from conftest import Ended, Job, Start

pytestmark = pytest.mark.mpi

#: Ranks of torch take seconds to begin: what the transports share is tried with both in `tools/test --full`.
BOTH = pytest.mark.parametrize("transport", ["mpi", "torch"], indirect=True)
USUAL = ["mpi", pytest.param("torch", marks=pytest.mark.full)]

HERE = Path(__file__).parent
RANKS = 3
#: Within a second survivors know of a dead rank; the rest is the launcher's, and a busy machine's, in seconds.
SOON_S = 10.0
LANE = "gradients.0[0] (allreduce)"


@pytest.fixture(params=USUAL)
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "mpi" and find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    return str(request.param)


def notifies_of_deaths(transport: str) -> bool:
    """Return whether ranks live on that learn of another's death."""
    return transport == "torch" or find_mpiexec().notifies_of_deaths


@pytest.fixture
def begin(start: Start, tmp_path: Path, transport: str) -> Callable[..., Job]:
    """Return a function that starts ranks of which `who` does `how` at step 3, and that waits until then."""

    def begin_job(
        how: str = "nothing",
        who: int | str = "none",
        timeout_s: float = 60,
        launcher: str = "hocket",
        lanes: str = "host",
        operation: str = "allreduce",
    ) -> Job:
        ready = tmp_path / "ready"
        ready.mkdir()
        told = [how, str(who), str(timeout_s), str(ready), lanes, operation]
        rank = [sys.executable, str(HERE / "rank.py"), *told]
        if launcher == "hocket":
            return start(
                [sys.executable, str(HERE / "job.py"), transport, str(RANKS), str(tmp_path / "pids"), *rank]
            )
        environment = {**os.environ, "HOCKET_PID_FOLDER": str(tmp_path / "pids")}
        return start(find_mpiexec().command(RANKS, rank, folder=tmp_path / "launcher"), env=environment)

    return begin_job


def messages(errors: str) -> list[str]:
    """Return what is in `errors`: lines, of which a traceback before one is a part; no launcher's paragraph."""
    assert "MPI_ABORT" not in errors
    assert "prterun" not in errors
    assert "-----" not in errors
    return [line for line in errors.splitlines() if line.startswith("hocket:")]


@BOTH
def test_an_exception_on_one_rank(begin: Callable[..., Job]) -> None:
    ended = begin("fail", 1).end()
    assert messages(ended.errors) == [
        "hocket: rank 1 at step 3: ValueError: broken on purpose; all ranks end"
    ]
    assert ended.errors.count("Traceback") == 1
    assert ended.errors.startswith("Traceback (most recent call last):\n")
    assert ended.status == 1


def test_the_same_exception_on_all_ranks_is_told_once(begin: Callable[..., Job]) -> None:
    ended = begin("fail", "all").end()
    [message] = messages(ended.errors)
    # A rank that is late by more than ranks wait for each other is not known to fail, too.
    assert re.fullmatch(
        r"hocket: (all ranks|rank \d) at step 3: ValueError: broken on purpose; all ranks end", message
    )
    assert ended.errors.count("Traceback") == 1
    assert ended.status == 1


def test_a_users_mistake_on_all_ranks_has_no_traceback(begin: Callable[..., Job]) -> None:
    ended = begin("mistake", "all").end()
    [line] = ended.errors.strip("\0\n").splitlines()
    assert line.endswith(" at step 3: run.yaml: epochs: got 'x'")
    assert ended.status == 2


def test_sys_exit_on_one_rank(begin: Callable[..., Job]) -> None:
    ended = begin("sys.exit", 1).end()
    [message] = messages(ended.errors)
    assert message.startswith(
        "hocket: rank 1 ended at step 3 (sys.exit, or the end of its script) while ranks 0, 2 "
    )
    assert f"wait in {LANE} for " in message
    assert ended.status == 1


def test_the_end_of_the_script_on_rank_0(begin: Callable[..., Job]) -> None:
    ended = begin("end", 0).end()
    [message] = messages(ended.errors)
    assert message.startswith(
        "hocket: rank 0 ended at step 3 (sys.exit, or the end of its script) while ranks 1, 2 "
    )
    assert ended.status == 1


def test_sys_exit_on_all_ranks(begin: Callable[..., Job]) -> None:
    ended = begin("sys.exit", "all").end()
    [message] = messages(ended.errors)
    assert message.endswith("ended with exit code 3; all ranks were ended")
    assert ended.status == 3


def test_an_exit_past_python(transport: str, begin: Callable[..., Job]) -> None:
    ended = begin("os._exit", 2).end()
    assert ended.status != 0
    [message] = messages(ended.errors)
    if transport == "torch" or find_mpiexec().vendor == "openmpi":
        assert message == "hocket: rank 2 ended with exit code 4; all ranks were ended"


def test_an_interrupt_on_one_rank(begin: Callable[..., Job]) -> None:
    ended = begin("interrupt", 2).end()
    assert ended.errors.strip("\0\n") == "hocket: rank 2 at step 3: interrupted; all ranks end"
    assert ended.status == 130


@BOTH
@pytest.mark.parametrize("how", [pytest.param("nothing", marks=pytest.mark.full), "large"])
def test_a_killed_rank(how: str, transport: str, begin: Callable[..., Job], tmp_path: Path) -> None:
    """Survivors name it, also where they wait in shared memory and no call of MPI fails."""
    job = begin(how)
    job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == RANKS)
    os.kill(job.pid_of(1), signal.SIGKILL)
    killed_s = time.monotonic()
    ended = job.end()
    [message] = messages(ended.errors)
    assert "rank 1" in message or not notifies_of_deaths(transport)
    assert "was killed by SIGKILL" in message
    assert ended.status != 0
    if notifies_of_deaths(transport):
        assert re.match(
            r"hocket: at step \d+, rank [02](: gradients.0\[0\] \(allreduce\)| at the end of its script): "
            r"rank 1 has died; rank 1 on \S+ was killed by SIGKILL \(out of memory\? .*\); all ranks were ended$",
            message,
        )
        assert ended.status == 128 + signal.SIGKILL
        assert time.monotonic() - killed_s < SOON_S


def check_that_the_dead_is_named(ended: Ended, named: str, transport: str) -> None:
    """Rank 1 was killed in step 3, and the others waited for it in the operation that is named."""
    [message] = messages(ended.errors)
    assert "was killed by SIGKILL" in message
    if notifies_of_deaths(transport):
        assert re.match(
            rf"hocket: at step 3, rank [02]: gradients.0\[0\] \({named}\): rank 1 has died; ", message
        )
    assert ended.status != 0


def test_a_rank_that_is_killed_while_the_others_compute(transport: str, begin: Callable[..., Job]) -> None:
    check_that_the_dead_is_named(begin("kill", 1).end(), "allreduce", transport)


@BOTH
@pytest.mark.parametrize(
    ("operation", "named"),
    [
        pytest.param("allreduce", "allreduce", marks=pytest.mark.full),
        ("exchange", "an exchange with neighbours"),
    ],
)
def test_a_killed_rank_and_lanes_on_devices(
    operation: str, named: str, transport: str, begin: Callable[..., Job]
) -> None:
    """Survivors name it, and where they waited, though torch knows of connections alone."""
    check_that_the_dead_is_named(begin("kill", 1, lanes="gloo", operation=operation).end(), named, transport)


@pytest.mark.full
def test_a_rank_that_computes_and_gossip_on_devices(begin: Callable[..., Job]) -> None:
    ended = begin("compute", 1, timeout_s=3, lanes="gloo", operation="exchange").end()
    [message] = messages(ended.errors)
    assert re.match(
        r"hocket: at step 3, rank [02] waits for rank 1 in gradients.0\[0\] \(an exchange with neighbours\): no end "
        r"after 3 s; rank 1 has not arrived: computing, in no exchange, for ",
        message,
    )
    assert ended.status == 1


@pytest.mark.full
def test_an_interrupt_of_a_rank_that_waits_for_gossip_on_devices(
    begin: Callable[..., Job], tmp_path: Path
) -> None:
    job = begin("compute", 1, lanes="gloo", operation="exchange")
    job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == RANKS)
    time.sleep(0.5)  # all but rank 1 wait in torch
    os.kill(job.pid_of(0), signal.SIGINT)
    interrupted_s = time.monotonic()
    ended = job.end()
    assert messages(ended.errors) == ["hocket: rank 0 at step 3: interrupted; all ranks end"]
    assert ended.status == 130
    assert time.monotonic() - interrupted_s < SOON_S


def test_all_ranks_but_one_are_killed(begin: Callable[..., Job], tmp_path: Path) -> None:
    job = begin()
    job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == RANKS)
    for rank in (1, 2):
        os.kill(job.pid_of(rank), signal.SIGKILL)
    ended = job.end()
    [message] = messages(ended.errors)
    assert "was killed by SIGKILL" in message
    assert ended.status != 0


def test_a_stopped_rank(begin: Callable[..., Job]) -> None:
    ended = begin("stop", 1, timeout_s=3).end()
    [message] = messages(ended.errors)
    assert message.startswith("hocket: at step 3, rank ")
    assert (
        f" waits for rank 1 in {LANE}: no end after 3 s; rank 1 has not arrived: computing, in no " in message
    )
    assert message.endswith(" waits there too; all ranks end")
    assert ended.status == 1


def test_a_skipped_collective(begin: Callable[..., Job]) -> None:
    ended = begin("skip", 1, timeout_s=2).end()
    [message] = messages(ended.errors)
    if message.startswith("hocket: at step 3, rank 1 "):
        assert (
            " waits for ranks 0, 2 in session (barrier): no end after 2 s; rank 0 has not arrived: "
            in message
        )
    else:
        assert f" waits for rank 1 in {LANE}: no end after 2 s; " in message
        assert "rank 1 has not arrived: waiting in session (barrier) for 2 s, step 3" in message
    assert ended.status == 1


@pytest.mark.parametrize(("number", "group"), [("SIGINT", True), ("SIGINT", False), ("SIGTERM", False)])
def test_a_signal_to_who_started_the_job(
    number: str, group: bool, begin: Callable[..., Job], tmp_path: Path
) -> None:
    job = begin()
    job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == RANKS)
    job.signal(signal.Signals[number], group=group)
    ended = job.end()
    assert ended.errors.strip("\0\n") == f"hocket: {number}: all ranks were ended"
    assert ended.status == 128 + signal.Signals[number]


def test_a_killed_parent_takes_its_ranks_along(begin: Callable[..., Job], tmp_path: Path) -> None:
    job = begin()
    job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == RANKS)
    job.signal(signal.SIGKILL)
    assert job.end().status == -signal.SIGKILL


def test_under_a_bare_mpiexec_the_message_is_the_same(begin: Callable[..., Job]) -> None:
    ended = begin("fail", 1, launcher="mpiexec").end()
    lines = [line for line in ended.errors.splitlines() if line.startswith("hocket:")]
    assert lines == ["hocket: rank 1 at step 3: ValueError: broken on purpose; all ranks end"]
    assert ended.status != 0


def test_a_good_end_says_nothing(begin: Callable[..., Job]) -> None:
    ended = begin("finish").end()
    assert (ended.status, ended.errors) == (0, "")
