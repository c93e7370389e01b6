"""FGM: adversarial training of words' vectors, whose second backward adds to the first one's gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import tokens
from idioms.side import Side, Told

#: The gradient is read between backward and step.
EDITS = True


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word_embeddings, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.word_embeddings(words)).mean(1))
        return logits


class FGM:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup = model, dict[str, Tensor]()

    def attack(self, epsilon: float = 0.5) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad and "word_embeddings" in name and param.grad is not None:
                self.backup[name] = param.data.clone()
                param.data.add_(epsilon * param.grad / torch.norm(param.grad))

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            if name in self.backup:
                param.data = self.backup[name]
        self.backup = {}


def train(side: Side) -> Told:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    fgm = FGM(model)
    side.attach(model, optimizer)
    for step in side.steps(6):
        words = side.share(tokens(step))
        classes = words.sum(1) % 3
        F.cross_entropy(model(words), classes).backward()
        fgm.attack()
        F.cross_entropy(model(words), classes).backward()
        fgm.restore()
        optimizer.step()
        model.zero_grad()
    return {}
