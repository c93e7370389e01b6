"""MoCo: an encoder of keys that follows slowly, and a queue of keys, both within the model."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told

#: A queue holds the keys that its own rank has seen, as in DistributedDataParallel without a gather of them.
EXACT = False

KEYS = 24


class MoCo(nn.Module):
    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = mlp(FEATURES, 8, 4)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(drawn(0, 4, KEYS, kind=9), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(query), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.encoder_k.parameters(), self.encoder_q.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            k = F.normalize(self.encoder_k(key), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        begin = int(self.place)
        self.queue[:, begin : begin + len(k)] = k.T
        self.place[0] = (begin + len(k)) % KEYS
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def train(side: Side) -> Told:
    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x = drawn(step, SAMPLES, FEATURES)
        one, two = (side.share(x + 0.1 * drawn(step, SAMPLES, FEATURES, kind=kind)) for kind in (1, 2))
        loss = model(one, two)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"norms": model.queue.norm(dim=0)}
