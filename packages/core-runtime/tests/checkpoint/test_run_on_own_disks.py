"""`hocket run` and `hocket resume` on hosts that share no disk: killed, swapped, and with a host that is gone.

A host is a working directory of its own here, within which the run's folder has the same name. The oracle is the same
run in one process, which is never stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hocket
from hocket.checkpoint.folder import complete
from hocket.cli.own_disks import resumed_run
from hocket.errors import UserError
from hocket.results.provenance import add_start

OUT = "runs/a"
SETTINGS = ("dpsgd", "checkpoint.every=2", "log_every=5")
STEPS = 100
#: What is not there will not come.
PROGRAM = (
    "from hocket.checkpoint import shared; shared.LATE_S = 0.2; from hocket.cli.main import main; main()"
)

pytestmark = pytest.mark.timeout(240)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def begin(hosts: Sequence[Path], *words: str) -> list[subprocess.Popen[str]]:
    """Start `hocket` as a rank in each of two directories, as torchrun does."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank, host in enumerate(hosts):
        host.mkdir(exist_ok=True)
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words],
                cwd=host,
                env={**os.environ, **meeting, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def ended(ranks: Sequence[subprocess.Popen[str]]) -> tuple[list[int | None], str]:
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(said)


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = ("-n", "2", "--transport", "virtual", f"steps={STEPS}", "--out", str(folder))
    assert request.getfixturevalue("hocket")("run", *SETTINGS, *words).status == 0
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two hosts, `a` and `b`, whose run was killed once both had a checkpoint."""
    folder = tmp_path_factory.mktemp("hosts")
    hosts = [folder / "a", folder / "b"]
    ranks = begin(hosts, "run", *SETTINGS, f"steps={STEPS}", "--out", OUT)
    end_s = time.monotonic() + 90
    while not all(len(complete(host / OUT / "checkpoints")) == 2 for host in hosts):
        assert time.monotonic() < end_s
        assert ranks[0].poll() is None, ended(ranks)
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    assert "is not visible to rank 1" in ended(ranks)[1]
    return folder


@pytest.fixture
def hosts(killed: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of both."""
    a, b = (Path(shutil.copytree(killed / name, tmp_path / name)) for name in "ab")
    return a, b


def results(folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the rows of a run without what depends on time, and its model."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("epoch", "step", "train_loss", "valid_loss", "consensus_distance")
    return [[row.get(key) for key in kept] for row in rows], load_file(folder / "model.safetensors")


def goes_on(hosts: Sequence[Path], whole: Path) -> None:
    statuses, said = ended(begin(hosts, "resume", OUT))
    assert statuses == [0, 0], said
    compare(hosts[0] / OUT, whole)


def compare(folder: Path, whole: Path) -> None:
    (rows, model), (expected_rows, expected) = results(folder), results(whole)
    assert rows == expected_rows
    assert model.keys() == expected.keys()
    assert all(torch.equal(model[name], expected[name]) for name in expected)


@pytest.mark.parametrize("order", [pytest.param("as before", marks=pytest.mark.full), "swapped"])
def test_a_killed_run_goes_on(order: str, hosts: tuple[Path, Path], whole: Path) -> None:
    """Bit for bit, with all rows of metrics, which come to rank 0's host, and so do the starts."""
    a, b = hosts
    assert [path.name for path in (b / OUT).iterdir()] == ["checkpoints"]
    in_order = hosts if order == "as before" else (b, a)
    goes_on(in_order, whole)
    assert len(json.loads((in_order[0] / OUT / "run.json").read_text())) == 2


@pytest.mark.full
def test_a_run_goes_on_where_it_began(hosts: tuple[Path, Path], whole: Path) -> None:
    """Rank 0 was on the other host meanwhile: the newer files come back."""
    a, b = hosts
    goes_on((b, a), whole)
    goes_on((a, b), whole)
    assert len(json.loads((a / OUT / "run.json").read_text())) == 3


@pytest.mark.full
def test_new_hosts_get_what_they_lack(hosts: tuple[Path, Path], whole: Path, tmp_path: Path) -> None:
    """The run's own files, and checkpoints of ranks that others have."""
    a, b = hosts
    for path in complete(b / OUT / "checkpoints"):
        for file in path.glob("rank-0001*"):
            shutil.copy(file, a / OUT / "checkpoints" / path.name)
    goes_on([tmp_path / "new", a], whole)


def test_files_that_no_host_has_are_named(hosts: tuple[Path, Path], tmp_path: Path) -> None:
    statuses, said = ended(begin([hosts[0], tmp_path / "new"], "resume", OUT))
    assert all(statuses)
    assert "rank-0001.safetensors: expected " in said
    assert f"it is missing; no rank has it (saved on {socket.gethostname()})" in said


def test_a_run_that_no_host_has_is_named(hosts: tuple[Path, Path], tmp_path: Path) -> None:
    folders = [tmp_path / "new" / OUT, hosts[1] / OUT]

    def resume() -> None:
        resumed_run(folders[hocket.join().rank], [], None)

    with pytest.raises(UserError, match=r"holds no run to resume: no host has config\.yaml there") as caught:
        hocket.virtual(2).run(resume)
    for folder in folders:
        assert f"{folder} on " in str(caught.value)


@pytest.mark.parametrize("mine", ["older", "another", "foreign"])
def test_only_an_older_state_of_the_run_is_replaced(mine: str, whole: Path, tmp_path: Path) -> None:
    """Rank 0's files stay if they are another run's, or not Hocket's."""
    own, newer = (Path(shutil.copytree(whole, tmp_path / name)) for name in "ab")
    add_start(newer, {"command": "hocket resume", "directory": "/"})
    if mine == "another":
        add_start(own, {"command": "hocket run sgd", "directory": "/"}, anew=True)
    elif mine == "foreign":
        for name in ("config.yaml", ".hocket.json"):
            (own / name).unlink()
        (own / "metrics.jsonl").write_text("mine")
    before = (own / "metrics.jsonl").read_text(), (own / "run.json").read_text()

    def resume() -> str:
        return resumed_run((own, newer)[hocket.join().rank], ["steps=300"], None).strategy.name or ""

    if mine == "foreign":
        with pytest.raises(UserError, match=r"metrics\.jsonl.*which Hocket did not write"):
            hocket.virtual(2).run(resume)
    else:
        assert hocket.virtual(2).run(resume) == ["dpsgd", "dpsgd"]
    after = (own / "metrics.jsonl").read_text(), (own / "run.json").read_text()
    newest = (newer / "metrics.jsonl").read_text(), (newer / "run.json").read_text()
    assert after == (newest if mine == "older" else before)


#: An ssh whose hosts are directories beside the present one.
SSH = """
import os, shlex, sys
*_, host, command = sys.argv
words = shlex.split(command)
place = words.index("hocket.launch.far_rank") + 1
words[place] = os.path.join(os.path.dirname(words[place]), host)
os.execvp(words[0], words)
"""


@pytest.mark.parametrize("order", ["as before", pytest.param("swapped", marks=pytest.mark.full)])
def test_hosts_by_ssh(order: str, hosts: tuple[Path, Path], whole: Path, tmp_path: Path) -> None:
    """The ranks of another host need nothing of the run's folder."""
    a, b = hosts
    b.rename(tmp_path / "127.0.0.2")
    (tmp_path / "ssh.py").write_text(SSH)

    def resume(given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hocket", "resume", OUT, "--hosts", given, "--transport", "torch"],
            cwd=a,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HOCKET_SSH": f"{sys.executable} {tmp_path / 'ssh.py'}",
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    if order == "swapped":
        refused = resume("127.0.0.2:1,localhost:1")
        assert refused.returncode == 2
        assert "config.next.yaml is not on " in refused.stderr
        assert "put the host on which you call `hocket run` first in --hosts" in refused.stderr
    else:
        done = resume("localhost:1,127.0.0.2:1")
        assert done.returncode == 0, done.stderr
        compare(a / OUT, whole)


def test_another_hosts_earlier_run_is_refused_before_training_or_replaced(hosts: tuple[Path, Path]) -> None:
    """Where the launcher has another first host than before, which has nothing of it."""
    a, b = hosts
    shutil.rmtree(a)
    earlier = [path.name for path in complete(b / OUT / "checkpoints")]
    new = ("run", "dpsgd", "steps=4", "checkpoint.every=3", "--out", OUT)
    statuses, said = ended(begin(hosts, *new))
    assert statuses == [2, 2]
    assert (
        f"{b / OUT / 'checkpoints'} on {socket.gethostname()} holds {earlier[-1]} of an earlier run: continue that "
        "with `hocket resume`, name another folder with --out, or replace it with --overwrite"
    ) in said
    assert "Traceback" not in said
    assert not (a / OUT / "metrics.jsonl").exists()
    assert [path.name for path in complete(b / OUT / "checkpoints")] == earlier
    statuses, said = ended(begin(hosts, *new, "--overwrite"))
    assert statuses == [0, 0], said
    for host in hosts:
        assert [path.name for path in complete(host / OUT / "checkpoints")] == [
            "step-00000003",
            "step-00000004",
        ]


def test_another_hosts_checkpoints_with_others_files_are_not_replaced(hosts: tuple[Path, Path]) -> None:
    _, b = hosts
    kept = complete(b / OUT / "checkpoints")[0]
    (kept / "notes.txt").touch()
    statuses, said = ended(begin(hosts, "run", "dpsgd", "steps=4", "--out", OUT, "--overwrite"))
    assert statuses == [2, 2]
    assert (
        f"rank 1: {OUT}/checkpoints: {kept.name} holds files that Hocket did not write, or a damaged manifest, so it "
        "is not replaced: name another folder with --out, or move it away"
    ) in said
