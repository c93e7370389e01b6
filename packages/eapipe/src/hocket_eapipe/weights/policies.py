"""The weights of a stage under the policy of a pipeline's configuration."""

from __future__ import annotations

from collections.abc import Callable

from hocket.api import MakeOptimizer
from hocket_eapipe.configuration import PipelineConfig, Policy
from hocket_eapipe.optimizers import Follower
from hocket_eapipe.weights.api import StagePart, Weights
from hocket_eapipe.weights.elastic import Elastic, replicate
from hocket_eapipe.weights.newest import Flush, Naive, Stashing, VerticalSync
from hocket_eapipe.weights.spectrain import SpecTrain

_NEWEST: dict[Policy, Callable[[StagePart, Follower], Weights]] = {
    Policy.NAIVE: Naive,
    Policy.STASHING: Stashing,
    Policy.VERTICAL_SYNC: VerticalSync,
    Policy.SPECTRAIN: SpecTrain,
    Policy.FLUSH: Flush,
}


def weights_of(
    engine: PipelineConfig, part: StagePart, leader: Follower, make_optimizer: MakeOptimizer | None
) -> Weights:
    """Return the weights of a stage.

    Args:
        engine: the configuration.
        part: the stage.
        leader: the optimizer of the stage's own parameters.
        make_optimizer: makes the optimizers of replicas; None to copy the one that the leader follows.
    """
    if engine.policy is not Policy.ELASTIC:
        return _NEWEST[engine.policy](part, leader)
    master = part.parameters()
    replicas = [replicate(part) for _ in range(part.num_stages)]
    followers = [
        Follower(leader.followed, {master[name]: t for name, t in replica.items()}, make_optimizer)
        for replica in replicas
    ]
    return Elastic(part, leader, followers, replicas, engine.alpha, engine.tau, engine.buffers)
