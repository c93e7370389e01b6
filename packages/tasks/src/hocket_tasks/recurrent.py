"""Recurrent networks over padded sequences.

Shapes: B batch, T the longest sequence of the batch, F features, H hidden units, K classes or characters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SequenceClassifier(nn.Module):
    """An LSTM and a linear layer over its state at each sequence's last element.

    Takes float [B, T, F], returns [B, K]. An element of zeros is padding.
    """

    def __init__(self, num_features: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_features, hidden, batch_first=True)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.lstm(inputs)
        last = (inputs != 0).any(dim=2).sum(dim=1).sub_(1)
        logits: Tensor = self.output(states[torch.arange(len(inputs)), last])
        return logits


class CharacterModel(nn.Module):
    """An embedding, an LSTM and a linear layer over its states: int64 [B, T] to logits [B, T, K]."""

    def __init__(self, num_characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(characters))
        logits: Tensor = self.output(states)
        return logits
