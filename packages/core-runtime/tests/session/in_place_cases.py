"""Cases for the MPI ranks of test_mpi.py, with segments large enough to be exchanged in shared memory.

Each case compares with a computation in its own process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import NonFiniteError
from hocket.testing.session import inner_of
from hocket.topology import Ring
from hocket.transport.peer import Peer

WIDTH = 600  # 360,000 numbers a layer: 1.4 MB


def model_of(seed: int = 0) -> nn.Sequential:
    torch.set_num_threads(1)  # in each rank; two give other bits
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(peer: Peer, strategy: Any, steps: int = 3, lr: float = 0.1, seed: int = 0) -> tuple[Tensor, Any]:
    model = model_of(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with hocket.attach(model, optimizer, strategy, peer=peer, initial="keep") as session:
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(batch(peer.rank, step)).square().mean().backward()
            optimizer.step()
        buffers = [
            (s.outgoing, s.incoming) for opened in inner_of(session).phase.opened for s in opened.segments
        ]
    return flat(model), buffers


def gradients_have_one_buffer(peer: Peer) -> None:
    """The exchange of gradients is in place, and the numbers those of one process with all batches."""
    expected = model_of()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(expected(batch(rank, step)).square().mean() for rank in range(peer.size))
        (loss / peer.size).backward()
        optimizer.step()
    for strategy in ("sgd", hocket.compose("agd", "gradients.0.segments=bytes")):
        own, buffers = trained(peer, strategy)
        assert all(outgoing is incoming for outgoing, incoming in buffers)
        torch.testing.assert_close(own, flat(expected), rtol=1e-5, atol=1e-6)


def gossip_mixes_parameters_where_they_are(peer: Peer) -> None:
    """With learning rate 0, replicas are the product of the mixing matrices."""
    start = torch.stack([flat(model_of(rank)) for rank in range(peer.size)]).double()
    matrix = torch.from_numpy(Ring().mixing_matrix(peer.size, 0, 0))
    expected = matrix @ matrix @ start
    for hidden in ({"overlap": "none"}, {"overlap": "forward"}, {"delay": 1}):
        exchange = {"collective": "gossip", "topology": "ring", **hidden}
        own, buffers = trained(peer, {"parameters": [exchange]}, steps=2, lr=0.0, seed=peer.rank)
        assert all((outgoing is incoming) == ("delay" not in hidden) for outgoing, incoming in buffers)
        torch.testing.assert_close(own.double(), expected[peer.rank], rtol=1e-5, atol=1e-6)


def forward_mixes_in_place_too_and_changes_no_bit(peer: Peer) -> None:
    def exchange(overlap: str, progress: str = "inline") -> Any:
        gossip = {"collective": "gossip", "topology": "exponential", "segments": "layers"}
        return {"parameters": [{**gossip, "overlap": overlap, "progress": progress}]}

    expected, _ = trained(peer, exchange("none"), steps=4)
    for progress in ("inline", "thread"):
        own, buffers = trained(peer, exchange("forward", progress), steps=4)
        assert all(outgoing is incoming for outgoing, incoming in buffers)
        assert torch.equal(own, expected)


def averages_and_broadcasts_are_in_place(peer: Peer) -> None:
    mean = torch.stack([flat(model_of(rank)) for rank in range(peer.size)]).double().mean(0)
    own, buffers = trained(
        peer, {"parameters": [{"collective": "allreduce", "segments": "bytes"}]}, 1, 0.0, peer.rank
    )
    assert all(outgoing is incoming for outgoing, incoming in buffers)
    torch.testing.assert_close(own.double(), mean, rtol=1e-5, atol=1e-6)
    broadcast = {"collective": {"name": "broadcast", "root": 1}, "segments": "bytes"}
    shared = {"gradients": [{"collective": "allreduce", "segments": "bytes"}], "parameters": [broadcast]}
    own, buffers = trained(peer, shared, 1, 0.0, peer.rank)
    assert all(outgoing is incoming for outgoing, incoming in buffers)
    torch.testing.assert_close(own, flat(model_of(1)), rtol=0, atol=0)


def a_nan_that_is_mixed_names_its_rank(peer: Peer) -> None:
    """Everybody who hears of it raises; who does not, goes on."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    culprit = peer.size - 1
    exchange = {"collective": "gossip", "topology": "complete"}
    session = hocket.attach(model, optimizer, {"parameters": [exchange]}, peer=peer)
    model(batch(peer.rank, 0)).square().mean().backward()
    if peer.rank == culprit:
        with torch.no_grad():
            model.get_parameter("2.weight")[5, 7] = float("nan")
    expected = rf"parameter 2\.weight of rank {culprit} is NaN or Inf after step 1"
    with pytest.raises(NonFiniteError, match=expected):
        optimizer.step()
    session.__exit__(NonFiniteError, None, None)


def groups_share_memory_too(peer: Peer) -> None:
    group, leaders = {"name": "group", "size": 2}, {"name": "leaders", "size": 2}
    stages = [
        {"collective": "allreduce", "over": group, "overlap": "backward"},
        {"collective": "allreduce", "over": leaders},
        {"collective": "broadcast", "over": group},
    ]
    own, _ = trained(peer, {"gradients": stages})
    plain, _ = trained(peer, "sgd")
    torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-6)
    for sharded in (False, True):
        mixed = [
            {
                "collective": "gossip",
                "over": {**leaders, "sharded": sharded},
                "topology": "ring",
                "segments": "layers",
            },
            {"collective": "broadcast", "over": {**group, "sharded": sharded}, "segments": "layers"},
        ]
        strategy = {"gradients": [{"collective": "allreduce", "over": group}], "parameters": mixed}
        own, _ = trained(peer, strategy)
        told = peer.allgather_bytes(own.numpy().tobytes())
        assert told[peer.rank // 2 * 2] == told[peer.rank]


CASES = (
    gradients_have_one_buffer,
    gossip_mixes_parameters_where_they_are,
    forward_mixes_in_place_too_and_changes_no_bit,
    averages_and_broadcasts_are_in_place,
    groups_share_memory_too,
    a_nan_that_is_mixed_names_its_rank,
)
