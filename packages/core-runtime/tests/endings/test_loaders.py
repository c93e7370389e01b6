"""A rank that gets nothing more from its loader: the others say for whom they wait, and what it does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Start

# A worker cannot pickle a sample, so nothing comes; or it is killed, as where memory is short, ends, or fails.
SCRIPT = """
import os, signal, sys
import torch, hocket

class Samples(torch.utils.data.Dataset):
    def __init__(self, fault, rank):
        self.fault, self.rank = fault, rank
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.rank == 1 and index >= 16:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "ended":
                os._exit(0)
            if self.fault == "failed":
                raise ValueError("no such sample")
            return lambda: None
        return torch.ones(2)

if __name__ == "__main__":
    peer = hocket.join()
    peer.timeout_s = 3.0
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hocket.attach(model, optimizer, "sgd", peer=peer)
    samples = Samples(sys.argv[1], peer.rank)
    loader = torch.utils.data.DataLoader(samples, 4, num_workers=1, collate_fn=list)
    for batch in session.data(loader):
        model(torch.stack(batch)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
# All ranks wait for their third batch, together for longer than is without a report.
ALL_READ = """
import time
from pathlib import Path
import torch, hocket
from hocket.training.startup import defer_dynamo
from hocket.transport.host import status

defer_dynamo()
status.READING_REPORT_AFTER_S = 0.6

def batches():
    for number in range(5):
        if number == 2:
            Path(f"reads-{session.rank}").touch()
            while len([*Path().glob("reads-*")]) < session.size:
                time.sleep(0.01)
            time.sleep(1.2)
        yield torch.ones(4, 2)

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hocket.attach(model, optimizer, "sgd") as session:
    for batch in session.data(batches(), same_batches=True):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.7)  # which computes, and is no wait
"""
LAUNCH = [sys.executable, "-c", "from hocket.cli.main import main; main()", "launch", "-n", "2"]


BOTH = pytest.mark.parametrize("transport", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
FULL_ON_MPI = pytest.mark.parametrize(
    "transport", ["torch", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.full])]
)


def last_line(start: Start, folder: Path, fault: str, transport: str = "torch") -> str:
    (folder / "script.py").write_text(SCRIPT)
    ended = start([*LAUNCH, "--transport", transport, "script.py", fault], cwd=folder).end()
    assert ended.status == 1, ended.errors
    return ended.errors.splitlines()[-1]


def test_one_that_sends_nothing(start: Start, tmp_path: Path) -> None:
    line = last_line(start, tmp_path, "silent")
    assert "rank 0 waits for rank 1 in gradients.0" in line
    assert "rank 1 has not arrived: reading its data loader, in no exchange, for " in line


@BOTH
def test_all_that_read_for_long_say_so_once(start: Start, tmp_path: Path, transport: str) -> None:
    (tmp_path / "script.py").write_text(ALL_READ)
    ended = start([*LAUNCH, "--transport", transport, "script.py"], cwd=tmp_path).end()
    assert ended.status == 0, ended.errors
    lines = [line for line in ended.errors.splitlines() if "been reading" in line]
    expected = r"hocket: ranks 0, 1 have been reading their data loaders for \d s, step 1: training goes on with the .*"
    assert len(lines) == 1, ended.errors
    assert re.fullmatch(expected, lines[0])


@FULL_ON_MPI
def test_one_whose_worker_is_killed(start: Start, tmp_path: Path, transport: str) -> None:
    line = last_line(start, tmp_path, "killed", transport)
    cause = r"DataLoader worker .*(is killed by signal: Killed|exited unexpectedly)"  # as torch notices it
    where = "(, reading its data loader)?"  # or a signal's handler says so elsewhere
    assert re.fullmatch(rf"hocket: rank 1 at step \d+{where}: RuntimeError: {cause}; all ranks end", line), (
        line
    )


@FULL_ON_MPI
def test_one_whose_worker_fails(start: Start, tmp_path: Path, transport: str) -> None:
    """The line has the worker's own error."""
    line = last_line(start, tmp_path, "failed", transport)
    cause = "Caught ValueError in DataLoader worker process 0: ValueError: no such sample"
    where = r"rank 1 at step \d+, reading its data loader"
    assert re.fullmatch(f"hocket: {where}: {cause}; all ranks end", line), line


@FULL_ON_MPI
def test_one_whose_worker_ends(start: Start, tmp_path: Path, transport: str) -> None:
    """Torch raises a connection's error then, which must not be taken for one between ranks."""
    line = last_line(start, tmp_path, "ended", transport)
    where = r"rank 1 at step \d+, reading its data loader"
    assert re.fullmatch(rf"hocket: {where}: \w+Error(: .*)?; all ranks end", line), line
