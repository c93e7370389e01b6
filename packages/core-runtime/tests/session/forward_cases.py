"""Cases for the MPI ranks of test_mpi.py: overlap forward sends messages, and changes no bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hocket
from hocket.testing.session import inner_of
from hocket.transport.mpi import MPIPeer
from hocket.transport.peer import Memory

WIDTH, LAYERS = 260, 12


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
                assert all(map(opened.started, opened.segments))
            if step == 2 and peer.rank == 0:
                # The others wait elsewhere, while this one waits for them.
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
    before, peer.memory = peer.memory, Memory()  # so that they share none
    expected = trained(peer, "none")
    for progress in ("inline", "thread"):
        assert torch.equal(trained(peer, "forward", progress), expected)
    peer.memory = before
