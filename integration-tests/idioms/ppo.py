"""PPO: a rollout without gradients, then some epochs of minibatches over it, with clipped ratios and norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from idioms.batches import SAMPLES, drawn, mlp
from idioms.environment import ACTIONS, STATES, pushed, started
from idioms.side import Side, Told


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = mlp(STATES, 8, ACTIONS), mlp(STATES, 8, 1, seed=1)
        self.log_std = nn.Parameter(torch.full((ACTIONS,), -0.5, dtype=torch.float64))

    def forward(self, state: Tensor) -> tuple[Normal, Tensor]:
        return Normal(self.mean(state), self.log_std.exp()), self.value(state)[..., 0]


def rollout(policy: Policy, side: Side, step: int, length: int = 4) -> tuple[Tensor, ...]:
    state, rows = side.share(started(step, SAMPLES)), []
    for moment in range(length):
        acts, value = policy(state)
        action = acts.mean + acts.stddev * side.share(drawn(step, SAMPLES, ACTIONS, kind=moment))
        then, reward = pushed(state, action)
        rows.append((state, action, acts.log_prob(action).sum(-1), value, reward))
        state = then
    states, actions, log_ps, values, rewards = (torch.stack(each) for each in zip(*rows, strict=True))
    returns, follows = torch.zeros_like(rewards), policy(state)[1]
    for moment in reversed(range(length)):
        follows = returns[moment] = rewards[moment] + 0.9 * follows
    return states, actions, log_ps, returns, returns - values


def train(side: Side) -> Told:
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01, eps=1e-5)
    session = side.attach(policy, optimizer)
    for step in side.steps(4):
        session.settle()
        with torch.no_grad():
            rolled = rollout(policy, side, step)
        for minibatch in [0, 1, 2, 3, 3, 1]:
            states, actions, log_ps, returns, advantages = (each[minibatch] for each in rolled)
            acts, values = policy(states)
            ratio = (acts.log_prob(actions).sum(-1) - log_ps).exp()
            gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss = 0.5 * (values - returns).square().mean() - gain - 0.01 * acts.entropy().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    return {}
