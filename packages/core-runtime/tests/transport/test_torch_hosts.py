"""The torch transport over two hosts, which are network namespaces of `tools/netlab`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture(scope="module")
def told() -> list[tuple[list[bool], str, str, float]]:
    """Run two ranks on each of two hosts, and return what those say that are left."""
    sys.path.insert(0, str(TOOLS))
    from netlab_lab.lab import create

    with create(2, "1gbit") as lab:
        ranks = []
        for rank in range(4):
            # As where a host's own file of names has its name at the loopback, as Debian's has.
            host = "127.0.1.1" if rank < 2 else "host0"
            program = [sys.executable, str(HERE / "hosts_rank.py"), str(rank), "4", host, "29500"]
            ranks.append(subprocess.Popen(lab.inside(rank // 2, program), stdout=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    return [json.loads(text) for text in said[:3]]


def test_ranks_of_one_host_share_memory(told: list[tuple[list[bool], str, str, float]]) -> None:
    assert [shared for shared, *_ in told] == [[False, True]] * 3


def test_a_stall_report_tells_of_ranks_on_other_hosts(told: list[tuple[list[bool], str, str, float]]) -> None:
    for rank, (_, stalled, _, _) in enumerate(told):
        start = f"rank {rank} waits for rank 3 in gradients.0[0] (barrier): no end after 3 s; rank 3 has not arrived: "
        assert stalled.startswith(f"{start}computing, in no exchange, for ")
        assert "s, step 7; ranks " in stalled
        assert stalled.endswith(" wait there too")


def test_a_killed_rank_is_named_on_every_host(told: list[tuple[list[bool], str, str, float]]) -> None:
    for rank, (_, _, lost, seconds) in enumerate(told):
        assert lost.startswith(f"rank {rank}: ")
        assert lost.endswith(": rank 3 has died")
        assert seconds < 5
