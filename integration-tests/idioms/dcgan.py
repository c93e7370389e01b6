"""DCGAN: the discriminator has two backwards before its step, and the generator's leaves gradients in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import SAMPLES, drawn, images
from idioms.side import Side, Told


def train(side: Side) -> Told:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, stride=2)
    ).double()
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 2, stride=2), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 2), nn.Flatten()
    ).double()
    optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.5)
    optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.5)
    side.attach(generator, optimizer_g)
    side.attach(discriminator, optimizer_d)

    def judged(pictures: Tensor, is_real: bool) -> Tensor:
        logits = discriminator(pictures)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    for step in side.steps(6):
        real, noise = side.share(images(step)), side.share(drawn(step, SAMPLES, 3, 1, 1, kind=1))
        optimizer_d.zero_grad()
        judged(real, True).backward()
        fake = generator(noise)
        judged(fake.detach(), False).backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        judged(fake, True).backward()
        optimizer_g.step()
    return {}
