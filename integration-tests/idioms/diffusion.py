"""Denoising diffusion: noise of drawn times is predicted under autocast, and sampled from the average of weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told, flat

TIMES = 10


class Denoiser(nn.Module):
    alphas: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, FEATURES, dtype=torch.float64)
        self.body = mlp(FEATURES, 8, FEATURES)
        self.register_buffer("alphas", torch.linspace(0.99, 0.5, TIMES, dtype=torch.float64).cumprod(0))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        predicted: Tensor = self.body(noisy + self.time(time))
        return predicted


@torch.no_grad()
def sample(model: Denoiser) -> Tensor:
    x = drawn(0, 2, FEATURES, kind=7)
    for time in reversed(range(TIMES)):
        alpha = model.alphas[time]
        noise = model(x, torch.full((2,), time))
        x = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
    return x


def train(side: Side) -> Told:
    torch.manual_seed(0)
    model = Denoiser()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    session = side.attach(model, optimizer, average=average, scaler=scaler)
    for step in side.steps(6):
        clean, noise = (
            side.share(drawn(step, SAMPLES, FEATURES)),
            side.share(drawn(step, SAMPLES, FEATURES, kind=1)),
        )
        time = side.share(torch.arange(SAMPLES) * (step + 1) % TIMES)
        alpha = model.alphas[time][:, None]
        # In float64, which autocast leaves as it is.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(alpha.sqrt() * clean + (1 - alpha).sqrt() * noise, time)
            loss = F.mse_loss(predicted, noise)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        session.settle()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
    return {"average": flat(average), "sampled": sample(average)}
