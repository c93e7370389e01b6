"""Ranks on several hosts of netlab, as users start them: by `hocket launch --hosts`, and by torchrun on each host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_netlab import NETLAB, needs_hosts, netlab, running

pytestmark = needs_hosts

README_SCRIPT = Path(__file__).parents[2] / "packages/core-runtime/tests/launched/readme.py"
VARIABLES = ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "PYTHONPATH", "HOCKET_PID_FOLDER")
SHOW = f"""
import json, os, socket, sys
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
found = [rank, socket.gethostname()[-1], sys.argv[1:], [os.environ.get(name) for name in {VARIABLES}]]
open(f"{{rank}}.json", "w").write(json.dumps(found))
"""


@pytest.mark.parametrize(("transport", "agent"), [("torch", "HOCKET_SSH"), ("mpi", "PRTE_MCA_plm_ssh_agent")])
def test_hocket_launch_starts_ranks_on_other_hosts_which_have_what_those_of_this_one_have(
    transport: str, agent: str, tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "hosts").write_text("host0 slots=1\nhost1 slots=2\n")
    launch = f"{sys.executable} -m hocket launch --hosts hosts --transport {transport} show.py --lr 0.1"
    # ssh brings no variables along.
    (tmp_path / "ssh").write_text('exec env -i PATH="$PATH" HOME="$HOME" $NETLAB_AGENT "$@"\n')
    bare = f'export NETLAB_AGENT="${agent}" {agent}="sh {tmp_path}/ssh"'
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    script = f"cd {tmp_path} && {bare} && exec {launch}"
    job = netlab("exec", "0", "--", "sh", "-c", script, env={**environment, "PYTHONPATH": ":".join(sys.path)})
    assert job.returncode == 0, job.stderr
    everybody = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [found[:3] for found in everybody] == [
        [rank, host, ["--lr", "0.1"]] for rank, host in enumerate("011")
    ]
    given = [found[3] for found in everybody]
    assert given[0] == given[1] == given[2]
    assert None not in given[0]


def test_a_host_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    launch = f"{sys.executable} -m hocket launch --hosts host0:1,host7:1 {tmp_path / 'show.py'}"
    job = netlab("exec", "0", "--", *launch.split())
    assert job.returncode == 255
    assert "hocket: no rank has started (exit code 255)" in job.stderr
    assert "Each of host0, host7 has to be reachable without a password: `ssh host7 true`" in job.stderr


@pytest.mark.full
def test_torchrun_on_each_of_two_hosts(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "host0", "--master-port", "29500"]
    script = [str(README_SCRIPT), str(tmp_path)]
    with running(f"1100.{os.getpid()}", "--hosts", "2", "exec", "0") as (_, key):
        jobs = [
            subprocess.Popen(
                [NETLAB, "--lab", key, "exec", str(host), "--", *torchrun, "--node-rank", str(host), *script],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        for job in jobs:
            _, errors = job.communicate(timeout=90)
            assert job.returncode == 0, errors
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [(each["transport"], each["size"]) for each in told] == [("torch", 4)] * 4
    assert all(each["parameters"] == told[0]["parameters"] for each in told)


@pytest.mark.parametrize("transport", [pytest.param("torch", marks=pytest.mark.full), "mpi"])
@pytest.mark.parametrize(
    ("how", "who"),
    [
        ("stop", 3),
        pytest.param("compute", 2, marks=pytest.mark.full),
        pytest.param("stop", 0, marks=pytest.mark.full),
    ],
)
def test_a_report_names_the_rank_of_another_host_that_does_not_come(
    how: str, who: int, transport: str, tmp_path: Path
) -> None:
    """Rank 0 runs the store of the ranks' states: where it is stopped, those of its own host name it."""
    rank = Path(__file__).parents[2] / "packages/core-runtime/tests/endings/rank.py"
    launch = [sys.executable, "-m", "hocket", "launch", "--hosts", "host0:2,host1:2"]
    launch += ["--transport", transport, str(rank)]
    job = netlab("exec", "0", "--", *launch, how, str(who), "5", str(tmp_path))
    assert job.returncode == 1
    lane = re.escape("gradients.0[0] (allreduce)")
    named = rf"in {lane}: no end after 5 s; rank {who} has not arrived: computing, in no exchange, for \d+ s, step 3; "
    told = [line for line in job.stderr.splitlines() if line.startswith("hocket: at step 3, rank ")]
    assert any(re.search(named, line) for line in told), job.stderr
