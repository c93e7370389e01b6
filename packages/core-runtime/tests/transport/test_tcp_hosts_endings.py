"""However a rank ends over transport torch on two hosts, all end soon, with one host's message; `tools/test --full`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_tcp_hosts import CAN_MAKE_HOSTS, HERE, start, two_hosts

pytestmark = [
    pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="netlab needs root, ip, tc and unshare"),
    pytest.mark.full,
]

RANKS = 4
#: On the second host, of which one more rank is left.
WHO = 3
LANE = re.escape("gradients.0[0] (allreduce)")
SOON_S = 10.0

Begin = Callable[[str, float], list[subprocess.Popen[str]]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Return a function that starts two ranks on each host, of which the last does `how`, and waits until then."""
    ranks: list[subprocess.Popen[str]] = []
    with two_hosts() as hosts:

        def begin_job(how: str, timeout_s: float) -> list[subprocess.Popen[str]]:
            program = [str(HERE.parent / "endings" / "rank.py"), how, str(WHO), str(timeout_s), str(tmp_path)]
            meeting = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
            for rank in range(RANKS):
                environment = {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
                ranks.append(start(hosts, rank, program, stderr=subprocess.PIPE, env=environment))
            deadline_s = time.monotonic() + 60
            while len(list(tmp_path.iterdir())) < RANKS:
                assert time.monotonic() < deadline_s, "the ranks do not come to step 3"
                time.sleep(0.02)
            return ranks

        yield begin_job
        for rank in ranks:
            rank.kill()
            if rank.stderr is not None and not rank.stderr.closed:
                rank.communicate()


def said_by(ranks: list[subprocess.Popen[str]]) -> str:
    """Wait for ranks, and return what they write to stderr."""
    return "".join(rank.communicate(timeout=60)[1] for rank in ranks)


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("fail", 1, f"rank {WHO} at step 3: ValueError: broken on purpose; all ranks end"),
        ("interrupt", 130, f"rank {WHO} at step 3: interrupted; all ranks end"),
        (
            "end",
            1,
            rf"rank {WHO} ended at step 3 \(sys.exit, or the end of its script\) while ranks 0, 1, 2 wait in {LANE} "
            r"for .*",
        ),
    ],
)
def test_a_rank_that_ends_by_itself(begin: Begin, how: str, status: int, message: str) -> None:
    ranks = begin(how, 60)
    began_s = time.monotonic()
    said = said_by(ranks)
    assert time.monotonic() - began_s < SOON_S
    [line] = [line for line in said.splitlines() if line.startswith("hocket:")]
    assert re.fullmatch(f"hocket: {message}", line)
    assert said.count("Traceback") == (how == "fail")
    assert ranks[WHO].returncode == status
    assert all(rank.returncode for rank in ranks[:WHO])


def test_a_killed_rank(begin: Begin) -> None:
    ranks = begin("nothing", 60)
    ranks[WHO].send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    said = said_by(ranks)
    assert time.monotonic() - killed_s < SOON_S
    [line] = [line for line in said.splitlines() if line.startswith("hocket:")]
    assert re.fullmatch(rf"hocket: at step \d+, rank [012]: {LANE}: rank {WHO} has died; all ranks end", line)
    assert [rank.returncode for rank in ranks] == [1, 1, 1, -signal.SIGKILL]


def test_a_stopped_rank(begin: Begin) -> None:
    ranks = begin("stop", 3)
    said = said_by(ranks[:WHO])
    [line] = [line for line in said.splitlines() if line.startswith("hocket:")]
    assert re.match(
        rf"hocket: at step 3, rank [012] waits for rank {WHO} in {LANE}: no end after 3 s; rank {WHO} has not arrived: "
        "computing, in no ",
        line,
    )
    assert line.endswith(" wait there too; all ranks end")
    assert [rank.returncode for rank in ranks[:WHO]] == [1, 1, 1]
