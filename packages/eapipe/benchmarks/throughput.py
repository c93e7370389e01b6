"""Samples per second of a pipeline over MPI, against torch.distributed.pipelining (1F1B, Gloo), in one job.

    python packages/eapipe/benchmarks/throughput.py [--stages 2] [--width 512] [--depth 16] [--repetitions 5]

The same model with the same cuts, batches of as many samples, a step of SGD with momentum for each. torch's schedule
cuts a batch into micro-batches and is drained before each step, as policy flush does; the other policies have several
whole batches under way, and are drained at the end of a turn. The two sides take turns, the fastest of each counts;
the table gives samples per second, and each policy's ratio to torch's. Reported, too: the peak of tensor bytes on each
rank, and what `hocket plan` says of it.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import hocket
from hocket.launch.joining import join
from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.session.api import Loss
from hocket.transport.peer import Peer, gather
from hocket_eapipe import Balance, Pipeline
from hocket_eapipe.memory import TensorBytes
from hocket_eapipe.splitting import split

SAMPLES = 256
MICRO_BATCHES = 8
CLASSES = 10
POLICIES = ("flush", "stashing", "elastic")

#: A turn of one side: this many batches of SAMPLES.
BATCHES = 16


def model(width: int, depth: int) -> nn.Sequential:
    """Return a chain of linear layers: the same work in each."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def batch(number: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, width, generator=generator), torch.randint(
        0, CLASSES, (SAMPLES,), generator=generator
    )


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def torchs_turn(peer: Peer, width: int, depth: int) -> Callable[[], float]:
    """Return what takes a turn of torch's pipeline, and gives its seconds."""
    own = split(model(width, depth), peer.size, Balance.PARAMETERS, None)[peer.rank]
    optimizer = sgd(own)
    stage = PipelineStage(own, peer.rank, peer.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)
    is_first, is_last = peer.rank == 0, peer.rank == peer.size - 1
    batches = [batch(number, width) for number in range(BATCHES)]

    def turn() -> float:
        return timed(peer, run)

    def run() -> None:
        for inputs, target in batches:
            optimizer.zero_grad()
            given = (inputs,) if is_first else ()
            named = {"target": target} if is_last else {}
            schedule.step(*given, **named)
            optimizer.step()

    return turn


def hockets_turn(peer: Peer, policy: str, width: int, depth: int) -> tuple[Callable[[], float], str]:
    """Return what takes a turn of a policy, and gives its seconds; and its peak of tensors, measured and planned."""
    flushes = policy == "flush"
    engine = Pipeline(policy=policy, micro_batches=MICRO_BATCHES if flushes else 1)
    batches = [batch(number, width) for number in range(BATCHES)]
    loss: Loss = cross_entropy
    net = model(width, depth)
    planned = engine.plan_stages(net, sgd(net), batches[0], loss, peer.size)[peer.rank].peak_bytes
    session = hocket.attach(net, sgd(net), {}, peer=peer, engine=engine)

    def run() -> None:
        for each in batches:
            session.train_batch(each, loss)
        session.settle()

    with TensorBytes() as counter:
        # The batches are the caller's, but for the one that the first stage is at.
        counter.count(tensor for each in batches for tensor in each)
        others = counter.held if peer.rank else counter.held - batches[0][0].nbytes
        counter.count(net.parameters())
        run()
        gc.collect()
        counter.peak = counter.held
        run()
    measured = f"{(counter.peak - others) / 1e6:.2f} MB, planned {planned / 1e6:.2f}"
    return (lambda: timed(peer, run)), measured


def timed(peer: Peer, run: Callable[[], None]) -> float:
    """Return how long the slowest rank takes, from when all are ready."""
    peer.allgather_bytes(b"")
    start_s = time.perf_counter()
    run()
    own = time.perf_counter() - start_s
    return max(gather(peer, own))


def rank(width: int, depth: int, repetitions: int) -> None:
    """Measure on this rank of the job; rank 0 prints."""
    torch.set_num_threads(1)
    peer = join()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = gather(peer, free.getsockname()[1])[0]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=peer.rank, world_size=peer.size
    )
    turns = {"torch 1F1B, Gloo": torchs_turn(peer, width, depth)}
    memory: dict[str, list[str]] = {}
    for policy in POLICIES:
        turns[policy], told = hockets_turn(peer, policy, width, depth)
        memory[policy] = gather(peer, told)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for repetition in range(repetitions + 1):
        for name, turn in turns.items():
            taken = turn()
            if repetition:  # the first is a warm-up
                seconds[name].append(taken)
    dist.destroy_process_group()
    if peer.rank == 0:
        rates = {name: BATCHES * SAMPLES / min(taken) for name, taken in seconds.items()}
        base = rates["torch 1F1B, Gloo"]
        print(f"{peer.size} stages, {depth} layers of {width} x {width}, {os.cpu_count()} cores\n")
        print("| pipeline | samples per second | ratio | peak of tensors by rank |\n|---|---:|---:|---|")
        for name, rate in rates.items():
            print(f"| {name} | {rate:.0f} | {rate / base:.2f} | {'; '.join(memory.get(name, []))} |")
    peer.close()


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.width, given.depth, given.repetitions)
        return
    arguments = [f"--{key}={getattr(given, key)}" for key in ("width", "depth", "repetitions")]
    program = [sys.executable, __file__, "--rank", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(launch(find_mpiexec(), given.stages, program, folder=Path(folder)))


if __name__ == "__main__":
    main()
