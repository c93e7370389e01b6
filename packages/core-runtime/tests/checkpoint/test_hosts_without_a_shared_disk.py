"""Two hosts of `tools/netlab` whose ranks have folders of their own: killed, swapped, and gone on with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from own_disk_rank import TRAINING, digest_of
from training import on_ranks

from hocket.checkpoint.folder import complete

HERE = Path(__file__).parent
TOOLS = HERE.parents[3] / "tools"
# As in netlab's own tests.
CAN_MAKE_HOSTS = (
    os.geteuid() == 0
    and all(shutil.which(program) for program in ("ip", "tc", "unshare"))
    and subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=False).returncode == 0
)

pytestmark = pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="netlab needs root, ip, tc and unshare")


def two_hosts() -> AbstractContextManager[Any]:
    sys.path.insert(0, str(TOOLS))
    from netlab_lab.lab import create

    return create(2, "1gbit")


def start(hosts: Any, folders: Sequence[Path], what: str) -> list[subprocess.Popen[str]]:
    """Start four ranks, two of them on each host, which has the folder of its number."""
    ranks = []
    for rank in range(4):
        meeting = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
        program = [sys.executable, str(HERE / "own_disk_rank.py"), str(folders[rank // 2]), what]
        ranks.append(
            subprocess.Popen(
                hosts.inside(rank // 2, program),
                text=True,
                env={**os.environ, **meeting, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    return ranks


@pytest.mark.full  # eight Pythons that are no forks; `test_run_on_own_disks.py` swaps folders
def test_hosts_are_killed_and_come_back_swapped(tmp_path: Path) -> None:
    expected = [digest_of(result.bits()) for result in on_ranks(4, TRAINING)]
    folders = [tmp_path / "disk-0", tmp_path / "disk-1"]
    with two_hosts() as hosts:
        ranks = start(hosts, folders, "begin")
        end_s = time.monotonic() + 90
        while not all(len(complete(folder)) == 2 for folder in folders) and time.monotonic() < end_s:
            time.sleep(0.01)
        for rank in ranks:
            rank.kill()
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert all(complete(folder) for folder in folders), said
        again = start(hosts, folders[::-1], "go-on")
        told = [rank.communicate(timeout=120) for rank in again]
    assert [rank.returncode for rank in again] == [0] * 4, told
    assert [out.strip() for out, _ in told] == expected
    assert "is not visible to ranks 2, 3 on netlab-" in told[0][1]
    for folder in folders:
        assert len(list(folder.glob("step-*/rank-*"))) >= 4
