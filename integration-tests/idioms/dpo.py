"""DPO: a language model and its frozen reference outside of the session; chosen and rejected in one batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import tokens
from idioms.side import Side, Told


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer, self.head = (
            nn.Embedding(7, 6),
            nn.GRU(6, 6, batch_first=True),
            nn.Linear(6, 7),
        )
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.layer(self.words(words[:, :-1]))
        log_p = self.head(hidden).log_softmax(-1)
        likelihood: Tensor = log_p.gather(2, words[:, 1:, None])[..., 0].sum(1)
        return likelihood


def train(side: Side) -> Told:
    policy = Language()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    side.attach(policy, optimizer, scheduler=scheduler)
    side.still("reference", reference)
    for step in side.steps(6):
        chosen, rejected = side.share(tokens(step)), side.share(tokens(100 + step))
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            wanted, unwanted = reference(both).chunk(2)
        likely, unlikely = policy(both).chunk(2)
        loss = -F.logsigmoid(0.5 * ((likely - wanted) - (unlikely - unwanted))).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {}
