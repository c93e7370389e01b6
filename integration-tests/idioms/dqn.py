"""DQN: a network for targets that is set to the trained one every so many steps, and batches from a memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import SAMPLES, mlp
from idioms.environment import STATES, pushed, started
from idioms.side import Side, Told, flat

PUSHES = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)


def train(side: Side) -> Told:
    network, target = mlp(STATES, 8, 3), mlp(STATES, 8, 3)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.RMSprop(network.parameters(), lr=0.01)
    session = side.attach(network, optimizer, target=target)
    for step in side.steps(7):
        state = side.share(started(step % 3, SAMPLES))
        session.settle()
        with torch.no_grad():
            action = network(state).argmax(1)
            then, reward = pushed(state, PUSHES[action])
            wanted = reward + 0.9 * target(then).amax(1)
        loss = F.smooth_l1_loss(network(state).gather(1, action[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-1, 1)
        optimizer.step()
        if step % 3 == 2:
            target.load_state_dict(network.state_dict())
    return {"target": flat(target)}
