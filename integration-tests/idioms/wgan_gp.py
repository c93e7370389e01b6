"""WGAN-GP: several steps of the critic for one of the generator, and a penalty on the gradient's norm."""

from __future__ import annotations

import torch
from torch import nn

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    generator, critic = mlp(3, 6, FEATURES), mlp(FEATURES, 8, 1, seed=1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    side.attach(nn.ModuleDict({"critic": critic}), optimizer_c)
    side.attach(nn.ModuleDict({"generator": generator}), optimizer_g)
    for step in side.steps(8):
        real = side.share(drawn(step, SAMPLES, FEATURES) + 1)
        noise = side.share(drawn(step, SAMPLES, 3, kind=1))
        fake = generator(noise).detach()
        share = side.share(drawn(step, SAMPLES, 1, kind=2).sigmoid())
        between = (share * real + (1 - share) * fake).requires_grad_()
        [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        optimizer_c.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizer_c.step()
        if step % 2 == 1:
            optimizer_g.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            optimizer_g.step()
    return {}
