"""The time that communication adds to a training step: Hocket's sgd and agd against DistributedDataParallel on Gloo.

    python packages/core-runtime/benchmarks/added_to_step.py [RANKS] [--transport torch|mpi]

Over hosts a launcher starts it, `torchrun ... added_to_step.py --rank`, and Gloo's ranks meet at MASTER_ADDR, too.

Five linear layers of 2236 x 2236 (25 M parameters, 100 MB), batch 4, SGD, one thread per rank, all in one job, in
turns of 45 steps of which the last thirty count. With one rank it shows what a session costs where nothing is sent.
"""

from __future__ import annotations

import copy

from measuring import init_gloo, medians, run_ranks

WIDTH, LAYERS, BATCH = 2236, 5, 4


def rank() -> None:
    """Measure, as one of the ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import hocket

    torch.set_num_threads(1)
    peer = hocket.join()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(BATCH, WIDTH)

    def stepping(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    sides, sessions = [], []
    for name in ("local", "ddp", "sgd", "agd"):
        net: nn.Module = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        if name == "ddp":
            if peer.size == 1:
                continue
            init_gloo(peer)
            net = nn.parallel.DistributedDataParallel(net)
        elif name != "local":
            sessions.append((name, hocket.attach(net, optimizer, name, peer=peer)))
        sides.append((name, lambda net=net, optimizer=optimizer: stepping(net, optimizer)))
    seconds = medians(peer, sides, 2, in_a_row=45)
    ms = {name: 1e3 * s for name, s in seconds.items()}
    waits = {name: 1e3 * session.counters.exposed_wait_s / max(1, session.step) for name, session in sessions}
    if peer.rank == 0:
        print(
            f"{peer.size} ranks over {peer.transport}, torch {torch.__version__}, local step {ms['local']:.1f} ms"
        )
        for name, taken in ms.items():
            if name != "local":
                added = taken - ms["local"]
                line = f"{name:>6}: {taken:7.1f} ms, adds {added:7.2f} ms ({100 * added / ms['local']:.1f} %)"
                if "ddp" in ms and name != "ddp":
                    line += f", {added / (ms['ddp'] - ms['local']):.2f} of what DDP adds"
                if name in waits:
                    line += f", of which {waits[name]:.1f} ms waiting"
                print(line)
    for _, session in sessions:
        session.close()
    if peer.size > 1:
        dist.destroy_process_group()
    peer.close()


if __name__ == "__main__":
    run_ranks(__file__, rank)
