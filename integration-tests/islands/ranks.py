"""Ranks that train sharded models: python ranks.py, which reads lines `[folder, module, ranks, names]`.

For each it forks ranks, having imported torch, and each calls `MODULE.main(FOLDER, NAMES)` in torch's process group. It
prints their worst status; what they print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo.config  # the module itself, also where a stand-in delays it
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch import distributed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


def main(folder: Path, module: str, ranks: int, names: list[str]) -> int:
    program = importlib.import_module(f"islands.{module}")
    jobs = getattr(program, "JOBS", 1)
    port, own = _free_port(), [_free_port() for _ in range(jobs)]
    pids = []
    for rank in range(ranks):
        job, place = divmod(rank, ranks // jobs)
        variables = {"RANK": str(place), "WORLD_SIZE": str(ranks // jobs), "LOCAL_RANK": str(place)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own[job])}
        if jobs > 1:
            variables |= {"HOCKET_ISLAND": str(job), "HOCKET_ISLANDS": str(jobs)}
            variables |= {"HOCKET_MEET": f"127.0.0.1:{port}"}
        pids.append(_fork(folder, program, variables, names))
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _fork(folder: Path, program: object, variables: dict[str, str], names: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(2, 1)
        os.environ.update(variables)
        rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/group of {ranks} at {variables['MASTER_PORT']}",
            rank=rank,
            world_size=ranks,
        )
        program.main(folder, names)  # type: ignore[attr-defined]
        distributed.barrier()
        code = 0
    except BaseException:
        print(f"rank {variables['RANK']}:", file=sys.stderr)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        folder, module, ranks, names = json.loads(line)
        print(main(Path(folder), module, ranks, names), flush=True)
