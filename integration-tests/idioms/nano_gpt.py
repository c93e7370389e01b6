"""A small GPT as nanoGPT trains it: tied weights, micro-batches, a scaler, clipping, groups with and without decay."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import tokens
from idioms.side import Side, Told

WORDS, WIDE, MICROS = 7, 8, 2

#: Gradients are clipped.
EDITS = True


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDE)
        self.attention = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.wte(x)
        q, k, v = self.attention(self.norm(hidden)).split(WIDE, dim=2)
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.dim() >= 2]
    narrow = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]


def train(side: Side) -> Told:
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    session = side.attach(model, optimizer, scaler=scaler)
    for step in side.steps(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 * (1.0 + math.cos(math.pi * step / 5))
        batch = side.share(tokens(step, 6, WORDS))
        for micro, part in enumerate(batch.chunk(MICROS)):
            with session.accumulate() if micro < MICROS - 1 else nullcontext():
                loss = model(part[:, :-1], part[:, 1:]) / MICROS
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return {}
