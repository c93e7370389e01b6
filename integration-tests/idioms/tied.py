"""Tied weights: the words' vectors are the head's matrix, too; a tensor is frozen by hand through a mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import tokens
from idioms.side import Side, Told


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 6, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 7, bias=False)
        self.double()
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        logits: Tensor = self.head(self.layer(self.words(words), src_mask=mask))
        return logits


def train(side: Side) -> Told:
    model = Language()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": plain}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    side.attach(model, optimizer)
    for step in side.steps(5):
        words = side.share(tokens(step))
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {}
