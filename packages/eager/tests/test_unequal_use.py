"""A layer that one rank alone uses in some steps: where results are equal, replicas stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket


@pytest.mark.parametrize("candidates", [None, 1])
def test_replicas_stay_equal_though_one_rank_alone_uses_a_layer(candidates: int | None) -> None:
    collective = {"name": "eager.partial_allreduce", "candidates": candidates, "missed": "sum"}
    strategy = {"gradients": [{"collective": collective, "segments": "layers"}]}

    def body() -> list[float]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"always": nn.Linear(4, 1), "beside": nn.Linear(4, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with hocket.attach(model, optimizer, strategy) as session:
            rank = session.rank
            for step in range(9):
                session.peer.clock.sleep(0.01 * (1 + ((3 * rank + 7 * step) % 5) * 0.53 + rank * 0.0137))
                x = torch.full((2, 4), float(1 + step + rank))
                loss = model["always"](x).square().mean()
                if rank == 1 and step % 2 == 0:
                    loss = loss + model["beside"](x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [float(p.detach().sum()) for p in model["beside"].parameters()]

    first, *others = hocket.virtual(4).run(body)
    assert all(other == first for other in others)
