"""Off-policy learning as Stable-Baselines has it: a replay buffer, gradient steps now and then, a target by polyak."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told, flat

ACTIONS, AFTER, STEPS_EACH = 3, 2, 2


class ReplayBuffer:
    def __init__(self) -> None:
        self.transitions: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def sample(self, step: int) -> tuple[Tensor, ...]:
        return self.transitions[(7 * step + 3) % len(self.transitions)]

    def state_dict(self) -> dict[str, object]:
        return {"transitions": self.transitions}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.transitions = list(state["transitions"])  # type: ignore[call-overload]


def polyak_update(params: list[Tensor], target_params: list[Tensor], tau: float) -> None:
    with torch.no_grad():
        for param, target in zip(params, target_params, strict=True):
            target.data.mul_(1 - tau)
            torch.add(target.data, param.data, alpha=tau, out=target.data)


#: Gradients are clipped.
EDITS = True


def train(side: Side) -> Told:
    network = mlp(FEATURES, 8, ACTIONS)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    buffer = ReplayBuffer()
    session = side.attach(network, optimizer, target=target, buffer=buffer)
    for step in side.steps(6):
        state = drawn(step, SAMPLES, FEATURES)
        # Exploring needs the network's actions for nothing but the buffer: here they are drawn.
        action = drawn(step, SAMPLES, ACTIONS, kind=1).argmax(1)
        reward = state.gather(1, action[:, None])[:, 0]
        buffer.transitions.append((state, action, reward, drawn(step + 1, SAMPLES, FEATURES)))
        if step + 1 < AFTER:
            continue
        for number in range(STEPS_EACH):
            state, action, reward, following = map(side.share, buffer.sample(STEPS_EACH * step + number))
            with torch.no_grad():
                wanted = reward + 0.9 * target(following).amax(1)
            values = network(state).gather(1, action[:, None])[:, 0]
            loss = F.smooth_l1_loss(values, wanted)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
        session.settle()
        polyak_update(list(network.parameters()), list(target.parameters()), 0.1)
    return {"target": flat(target)}
