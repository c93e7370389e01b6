"""Cases for the MPI ranks of test_mpi.py that take their host for several: overlap forward sends segments in turn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hocket
from hocket.testing.session import inner_of
from hocket.transport.mpi import MPIPeer
from hocket.transport.peer import Memory

WIDTH, LAYERS = 260, 12  # 270 KB a layer: four are under way at a time


def trained(peer: MPIPeer, overlap: str, progress: str = "inline") -> Tensor:
    torch.manual_seed(peer.rank)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exchange = {
        "collective": "gossip",
        "topology": "ring",
        "segments": "layers",
        "overlap": overlap,
        "progress": progress,
    }
    with hocket.attach(model, optimizer, {"parameters": [exchange]}, peer=peer, initial="keep") as session:
        (opened,) = inner_of(session).phase.opened
        for step in range(4):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + peer.rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if overlap == "forward":
                begin(session)
                under_way = [opened.under_way(segment) for segment in opened.segments]
                assert sum(under_way) <= 4
                assert all(map(opened.started, opened.segments))
            if step == 2 and peer.rank == 0:
                # The others wait elsewhere, and begin meanwhile what this one waits for.
                with torch.no_grad():
                    model(x)
            session.gather(step)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def begin(session: hocket.Session) -> None:
    """Begin what the next forward would."""
    (exchange,) = inner_of(session).phase.parameters.exchanges
    with torch.no_grad():
        exchange.begin()


def forward_changes_no_bit(peer: MPIPeer) -> None:
    """With both ways of progress."""
    torch.set_num_threads(1)
    before = peer.shares_network, peer.memory
    peer.shares_network, peer.memory = True, Memory()
    expected = trained(peer, "none")
    for progress in ("inline", "thread"):
        assert torch.equal(trained(peer, "forward", progress), expected)
    peer.shares_network, peer.memory = before
