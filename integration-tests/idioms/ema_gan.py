"""A GAN in one module, with an optimizer for each half and a generator whose weights are an average."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told, flat


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(3, 6, FEATURES), mlp(FEATURES, 8, 1, seed=1)


def train(side: Side) -> Told:
    gan = Gan()
    average = copy.deepcopy(gan.generator).requires_grad_(False)
    optimizer_d = torch.optim.SGD(gan.discriminator.parameters(), lr=0.1)
    optimizer_g = torch.optim.SGD(gan.generator.parameters(), lr=0.1)
    side.attach(gan, [optimizer_d, optimizer_g], average=average)
    for step in side.steps(6):
        real = side.share(drawn(step, SAMPLES, FEATURES) + 1)
        noise = side.share(drawn(step, SAMPLES, 3, kind=1))
        optimizer_d.zero_grad()
        fake = gan.generator(noise)
        loss = (
            F.softplus(-gan.discriminator(real)).mean() + F.softplus(gan.discriminator(fake.detach())).mean()
        )
        loss.backward()
        optimizer_d.step()

        gan.discriminator.requires_grad_(False)
        optimizer_g.zero_grad()
        F.softplus(-gan.discriminator(fake)).mean().backward()
        optimizer_g.step()
        gan.discriminator.requires_grad_(True)
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), gan.generator.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
    return {"average": flat(average)}
