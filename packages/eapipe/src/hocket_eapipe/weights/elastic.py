"""EA-Pipe: a master and N replicas of each stage, one for each batch under way, which pull each other.

Source: "Pipeline Parallelism With Elastic Averaging", 2024, sec. III and eq. 1. The text gives the
order as update, then pull, where ceil(t / N) is a multiple of tau; so is it here (the appendix's algorithms 2 and 3,
written for the proof, pull before).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.api import plain
from hocket_eapipe.configuration import BatchNormStatistics
from hocket_eapipe.optimizers import Follower
from hocket_eapipe.schedule import pulls, replica_of
from hocket_eapipe.weights.api import Binding, StagePart, Tensors, Weights, copied


class Elastic(Weights):
    """Elastic averaging: batch t reads and steps replica ((t - 1) mod N) + 1; the module is the master.

    Each replica's optimizer has a state of its own, made by its first step. The strategy's gradients are exchanged
    before a replica's step, its parameters, on the master, after the pull.

    Args:
        part: the stage.
        leader: the follower with the session's optimizer, which stands for the user's and never steps.
        followers: an optimizer for each replica, over `replicas` of the same place.
        replicas: their parameters, as `replicate` makes them.
        alpha: the strength of the pull, more than 0 and less than 1.
        period: tau, 1 or more.
        buffers: true: the floating-point buffers are pulled like the weights.
    """

    def __init__(
        self,
        part: StagePart,
        leader: Follower,
        followers: Sequence[Follower],
        replicas: Sequence[Tensors],
        alpha: float,
        period: int,
        buffers: BatchNormStatistics,
    ) -> None:
        self._part = part
        self._leader = leader
        self._followers = followers
        self._alpha = alpha
        self._period = period
        self._pulls_buffers = buffers is BatchNormStatistics.AVERAGED
        self._master = part.parameters()
        self._buffers = dict(part.module.named_buffers())
        self._bindings = [
            Binding(parameters, {name: buffer.detach().clone() for name, buffer in self._buffers.items()})
            for parameters in replicas
        ]

    def forward(self, batch: int) -> Binding:
        return self._bindings[replica_of(batch, len(self._bindings))]

    def exchange(self, gradients: Tensors, weight: float) -> None:
        session = self._part.session
        session.begin_batch(weight)
        for name, parameter in self._master.items():
            parameter.grad = gradients.pop(name, None)
        session.exchange_gradients()

    def step(self, batch: int) -> None:
        session, number = self._part.session, replica_of(batch, len(self._bindings))
        replica, follower = self._bindings[number], self._followers[number]
        self._leader.follow()
        with session.stepping():
            for name, tensor in replica.parameters.items():
                tensor.grad, self._master[name].grad = self._master[name].grad, None
            # Not the user's own optimizer: compressors have taken their terms out of the session's by now.
            follower.follow(session.optimizer)
            follower.optimizer.step()
            follower.optimizer.zero_grad()
            # The exchange that the last step has under way for the next forward belongs to the master.
            session.phase.parameters.merge_forward()
            if pulls(batch, len(self._bindings), self._period):
                self._pull(replica)

    def _pull(self, replica: Binding) -> None:
        pull(list(replica.parameters.values()), list(self._master.values()), self._alpha)
        for name, buffer in self._buffers.items():
            own = replica.buffers[name]
            if not buffer.is_floating_point():
                buffer.copy_(own)
            elif self._pulls_buffers:
                pull([own], [buffer], self._alpha)

    def state_dict(self) -> plain.Tree:
        return {
            "replicas": [
                {
                    "parameters": {name: tensor.detach() for name, tensor in binding.parameters.items()},
                    "buffers": dict(binding.buffers),
                    "optimizer": follower.optimizer.state_dict(),
                }
                for binding, follower in zip(self._bindings, self._followers, strict=True)
            ]
        }

    @torch.no_grad()
    def load_state_dict(self, state: plain.Tree) -> None:
        for binding, follower, saved in zip(self._bindings, self._followers, state["replicas"], strict=True):
            for own, given in (
                (binding.parameters, saved["parameters"]),
                (binding.buffers, saved["buffers"]),
            ):
                for name, tensor in own.items():
                    tensor.copy_(given[name])
            follower.optimizer.load_state_dict(saved["optimizer"])


@torch.no_grad()
def pull(replica: Sequence[Tensor], master: Sequence[Tensor], alpha: float) -> None:
    """Let replica and master pull each other (eq. 1).

    x -= alpha (x - m) and m += alpha (x - m), both with the x from before.
    """
    if not replica:
        return
    distance = torch._foreach_sub([x.data for x in replica], [m.data for m in master])
    torch._foreach_add_([x.data for x in replica], distance, alpha=-alpha)
    torch._foreach_add_([m.data for m in master], distance, alpha=alpha)


def replicate(part: StagePart) -> Tensors:
    """Return the parameters of a replica that begins at the master."""
    return {name: copied(parameter) for name, parameter in part.parameters().items()}
