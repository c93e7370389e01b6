"""Truncated backpropagation through time: a step for each piece of a sequence, the hidden state goes on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from idioms.batches import SAMPLES, tokens
from idioms.side import Side, Told


def train(side: Side) -> Told:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(7, 5), "lstm": nn.LSTM(5, 6, 2), "head": nn.Linear(6, 7)})
    model.double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    side.attach(model, optimizer)
    for step in side.steps(4):
        text = side.share(tokens(step, length=10)).T
        hidden = None
        for begin in range(0, 9, 3):
            words, following = text[begin : begin + 3], text[begin + 1 : begin + 4]
            out, hidden = model["lstm"](model["words"](words), hidden)
            loss = F.cross_entropy(model["head"](out).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.25)
            optimizer.step()
            hidden = tuple(each.detach() for each in hidden)
    assert hidden is not None
    return {"samples": torch.tensor(SAMPLES)}
