"""The torch transport over two hosts, which are network namespaces of `tools/netlab`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TOOLS = HERE.parents[3] / "tools"
# As in netlab's own tests.
CAN_MAKE_HOSTS = (
    os.geteuid() == 0
    and all(shutil.which(program) for program in ("ip", "tc", "unshare"))
    and subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=False).returncode == 0
)

pytestmark = pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="netlab needs root, ip, tc and unshare")


Told = list[tuple[list[bool], str, str, float]]


def start(hosts: Any, rank: int, program: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a rank, two of them on each host."""
    return subprocess.Popen(hosts.inside(rank // 2, [sys.executable, *program]), text=True, **options)


def two_hosts() -> AbstractContextManager[Any]:
    sys.path.insert(0, str(TOOLS))
    from netlab_lab.lab import create

    return create(2, "1gbit")


def test_ranks_end_with_one_message_though_the_store_is_gone(tmp_path: Path) -> None:
    """With rank 0, which has run it, nobody can read any more what the ranks of other hosts do."""
    program = [str(HERE.parent / "endings" / "rank.py"), "kill", "0", "30", str(tmp_path)]
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    with two_hosts() as hosts:
        ranks = [
            start(
                hosts, rank, program, stderr=subprocess.PIPE, env={**os.environ, **meeting, "RANK": str(rank)}
            )
            for rank in range(3)
        ]
        said = "".join(rank.communicate(timeout=60)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 1, 1]
    [message] = [line for line in said.splitlines() if line.startswith("hocket:")]
    assert message.startswith("hocket: at step 3, rank ")
    assert message.endswith(": gradients.0[0] (allreduce): rank 0 has died; all ranks end")


@pytest.fixture(scope="module")
def told() -> Told:
    """Run two ranks on each of two hosts, and return what those say that are left."""
    with two_hosts() as hosts:
        # As where a host's own file of names has its name at the loopback, as Debian's has.
        names = ["127.0.1.1", "127.0.1.1", "host0", "host0"]
        program = str(HERE / "hosts_rank.py")
        ranks = [
            start(hosts, rank, [program, str(rank), "4", name, "29500"], stdout=subprocess.PIPE)
            for rank, name in enumerate(names)
        ]
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    return [json.loads(text) for text in said[:3]]


def test_ranks_of_one_host_share_memory(told: Told) -> None:
    assert [shared for shared, *_ in told] == [[False, True]] * 3


def test_a_stall_report_tells_of_ranks_on_other_hosts(told: Told) -> None:
    for rank, (_, stalled, _, _) in enumerate(told):
        start = f"rank {rank} waits for rank 3 in gradients.0[0] (barrier): no end after 3 s; rank 3 has not arrived: "
        assert stalled.startswith(f"{start}computing, in no exchange, for ")
        assert "s, step 7; ranks " in stalled
        assert stalled.endswith(" wait there too")


def test_a_killed_rank_is_named_on_every_host(told: Told) -> None:
    for rank, (_, _, lost, seconds) in enumerate(told):
        assert lost.startswith(f"rank {rank}: ")
        assert lost.endswith(": rank 3 has died")
        assert seconds < 5
