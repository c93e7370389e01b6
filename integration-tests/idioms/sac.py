"""Soft actor-critic: three optimizers, critics that follow slowly, gradients that the actor leaves in critics."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from idioms.batches import SAMPLES, drawn, mlp
from idioms.environment import ACTIONS, STATES, pushed, started
from idioms.side import Side, Told, flat


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(STATES, 8, 2 * ACTIONS)
        self.critics = nn.ModuleList([mlp(STATES + ACTIONS, 8, 1, seed=seed) for seed in (1, 2)])
        self.log_alpha = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def act(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, -1)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_p = (-0.5 * noise.square() - log_std - torch.log(1 - action.square() + 1e-6)).sum(-1)
        return action, log_p


def least(critics: nn.Module, state: Tensor, action: Tensor) -> Tensor:
    both = torch.cat([state, action], -1)
    return torch.stack([critic(both)[:, 0] for critic in critics.children()]).amin(0)


def train(side: Side) -> Told:
    agent = Agent()
    targets = copy.deepcopy(agent.critics).requires_grad_(False)
    of_critics = torch.optim.Adam(agent.critics.parameters(), lr=0.01)
    of_actor = torch.optim.Adam(agent.actor.parameters(), lr=0.01)
    of_alpha = torch.optim.Adam([agent.log_alpha], lr=0.01)
    session = side.attach(agent, [of_critics, of_actor, of_alpha], targets=targets)
    for step in side.steps(6):
        state = side.share(started(step, SAMPLES))
        noises = [side.share(drawn(step, SAMPLES, ACTIONS, kind=kind)) for kind in (1, 2, 3)]
        session.settle()
        with torch.no_grad():
            action, _ = agent.act(state, noises[0])
            then, reward = pushed(state, action)
            next_action, log_p = agent.act(then, noises[1])
            wanted = reward + 0.9 * (least(targets, then, next_action) - agent.log_alpha.exp() * log_p)
        of_critics.zero_grad()
        both = torch.cat([state, action], -1)
        sum((critic(both)[:, 0] - wanted).square().mean() for critic in agent.critics).backward()
        of_critics.step()

        of_actor.zero_grad()
        action, log_p = agent.act(state, noises[2])
        (agent.log_alpha.exp().detach() * log_p - least(agent.critics, state, action)).mean().backward()
        of_actor.step()

        of_alpha.zero_grad()
        (-agent.log_alpha * (log_p.detach() - ACTIONS).mean()).backward()
        of_alpha.step()
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), agent.critics.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    return {"targets": flat(targets)}
