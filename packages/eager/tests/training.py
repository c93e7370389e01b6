"""A small training for sessions with partial collectives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hocket
from hocket.strategy import Strategy
from hocket.transport.peer import Peer

STEPS = 12


def strategy(collective: Mapping[str, Any] | str, **others: Any) -> Strategy:
    """Return gradients over the world with a collective, in two segments."""
    exchange = {"collective": collective, "segments": "layers", **others}
    return hocket.compose({"gradients": [exchange]})


def train(
    given: Strategy | str,
    *,
    steps: int = STEPS,
    paces_s: list[float] | None = None,
    batches: list[int] | None = None,
    learning_rate: float = 0.1,
    momentum: float = 0.9,
    save: tuple[Path, int] | None = None,
    load: Path | None = None,
) -> dict[str, Any]:
    """Train on this rank.

    Args:
        given: what crosses the wire.
        steps: how many.
        paces_s: how long a step of each rank takes; none at all by default.
        batches: how many each rank has; `steps` by default.
        learning_rate, momentum: of SGD.
        save: where to, and after which step, which is then the last.
        load: what to continue from.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    losses = []
    with hocket.attach(model, optimizer, given) as session:
        if load is not None:
            session.load(load)
        rank, peer = session.rank, session.peer
        own = [_batch(rank, step) for step in range(steps if batches is None else batches[rank])]
        for x, y in session.data(own):
            peer.clock.sleep(0.0 if paces_s is None else paces_s[(rank + session.step) % len(paces_s)])
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if save is not None and session.step == save[1]:
                session.save(save[0])
                break
        counters = session.counters
        told = {
            "equal": session.inner.replicas_equal,
            "active": counters.active / max(counters.outcomes, 1),
            "staleness": counters.staleness_max,
        }
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {**told, "parameters": flat.tolist(), "losses": losses}


def train_on(peer: Peer, config: Mapping[str, Any], paces_s: list[float]) -> dict[str, Any]:
    """Train on a rank of a job that tests have started; the peer is the one that `attach` finds."""
    torch.set_num_threads(1)
    assert peer.transport == "mpi"
    # Without momentum: with it solo diverges where a rank falls many steps behind, as it may on a busy machine.
    return train(hocket.compose(config), steps=120, paces_s=paces_s, learning_rate=0.05, momentum=0.0)


def resume_on(peer: Peer, config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Go on from what another number of ranks has saved, on a rank of a job that tests have started."""
    torch.set_num_threads(1)
    assert peer.transport == "mpi"
    return train(hocket.compose(config), load=Path(folder), paces_s=[0.001, 0.002])


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 5, generator=generator)
    return x, torch.tanh(x[:, :1] - x[:, 1:2])
