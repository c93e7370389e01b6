"""EMA as it is copied most: the average takes the place of `param.data` for an evaluation, and gives it back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import classified, mlp
from idioms.side import Side, Told


class EMA:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.shadow = {name: param.data.clone() for name, param in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, param in self.model.named_parameters():
            self.shadow[name] = ((1.0 - self.decay) * param.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self) -> None:
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]
        self.backup = {}

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.shadow = state


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = EMA(model, 0.9)
    session = side.attach(model, optimizer, ema=ema)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update()
        if step % 2 == 1:
            ema.apply_shadow()
            with session.consensus(), torch.no_grad():
                model(x)
            ema.restore()
    return {"shadow": torch.cat([each.reshape(-1) for each in ema.shadow.values()])}
