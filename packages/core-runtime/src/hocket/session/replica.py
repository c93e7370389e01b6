"""The model in training on one rank, as the phases of its strategy exchange it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hocket.errors import ReplacedError, SessionError
from hocket.segment.shard_storage import ShardStorage
from hocket.segment.staging import is_captured
from hocket.segment.storage import ParameterStorage
from hocket.session.island import Island
from hocket.session.ranks import broadcast_model, broadcast_optimizers, broadcast_unsharded, find_ranks
from hocket.session.save.untrained import Places, UntrainedTensors
from hocket.session.step.island_weights import IslandWeights
from hocket.session.step.optimizers import Optimizers
from hocket.session.step.state import StepState
from hocket.session.step.weights import BatchWeights, Contribution
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer


class Replica:
    """A model on this rank, or its shards, with optimizers and the weights of its batches; construction is collective.

    Args:
        model, optimizers: the attached ones.
        island: the ranks that hold this replica together, and those that it exchanges with.
        control: the lane among all ranks of the session.
        state: the session's, within its step.
        initial: the rank whose values replicas begin with, as for `hocket.attach`.
        may_skip: whether steps with NaN or Inf are left out.
        lanes_on_device: whether lanes exchange from the model's device.
        statistics: names of buffers that are averaged like BatchNorm's.
        begin_gradients: called before an exchange of gradients (see `GradientSync`).
        weight: returns the weight of the batch whose forward is under way.

    Attributes:
        begins_equal: whether all replicas hold the same bits when they begin.
        ranks: the ranks that it exchanges with, and their hosts.
        lane: among them.
        storage: the parameters' memory.
        weights: of this rank's batches.
        replaced: whether `check` has raised a ReplacedError, after which the session cannot go on.
        untrained: the model's tensors beside its trained parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        island: Island,
        control: Lane,
        state: StepState,
        begin_gradients: Callable[[], Contribution],
        weight: Callable[[], float],
        *,
        initial: str,
        may_skip: bool,
        lanes_on_device: bool = False,
        statistics: Sequence[str] = (),
    ) -> None:
        self.model, self.optimizers = model, optimizers
        peer = island.column
        self.lane = peer.lane("replicas") if island.own else control
        self.state, self.begin_gradients = state, begin_gradients
        self.may_skip = may_skip
        self.replaced = False
        self.begins_equal = peer.size == 1 or initial == "rank0"
        if island.own:
            broadcast_unsharded(model, island.lane)
        if initial == "rank0":
            self._take_from_rank0(peer)
        devices = [p.device for p in model.parameters() if p.requires_grad]
        # One rank alone sends to nobody, and its transport has no such lanes.
        on_device = lanes_on_device and peer.size > 1 and devices
        self.ranks = find_ranks(peer, devices[0] if on_device else None, island)
        self.storage = (ShardStorage if island.own else ParameterStorage)(model, self.ranks.host)
        #: Those but the CPU that parameters lie on.
        self._devices = {p.device for p in self.storage.parameters.values()} - {torch.device("cpu")}
        self.weights = BatchWeights(self.storage.parameters.values(), state)
        if island.shares > 1:
            self.weights = IslandWeights(model, self.storage.parameters.values(), state, island, weight)
        places = Places(peer, self.lane, island.everyone, control)
        self.untrained = UntrainedTensors(model, self.storage.parameters, statistics, places, self.weights)
        if self.begins_equal:
            self.untrained.note_equal()

    def _take_from_rank0(self, peer: Peer) -> None:
        lane = peer.lane("attach")
        broadcast_model(self.model, lane)
        broadcast_optimizers(self.optimizers, peer, lane)
        lane.close()

    def holders(self, flat: Tensor) -> int:
        """Return the number of ranks of this replica that hold the same as this rank's flat buffer of the storage."""
        island = self.ranks.island
        if island.own is None:
            return 1
        named = dict(zip(map(id, self.storage.flats), self.storage.parameters.values(), strict=True))
        return island.holders(named[id(flat)]) if id(flat) in named else island.size

    def close(self) -> None:
        """Close the lanes beside the exchanges; collective."""
        island = self.ranks.island
        if island.own is not None:
            self.lane.close()
        island.close()

    def check(self, *, take_values: bool) -> None:
        """Refuse modules, parameters and optimizers' groups that were replaced since attach.

        Args:
            take_values: whether to take over values that parameters were set to.

        Raises:
            ReplacedError: names the replaced object.
            SessionError: the step is being captured as a graph.
        """
        if any(map(is_captured, self._devices)):
            raise SessionError(
                "the step is being captured as a CUDA graph: the session's hooks would run during capture but not "
                "during replay, so ranks would exchange nothing. Train without a graph"
            )
        try:
            self.storage.check(take_values=take_values)
            self.optimizers.check()
        except ReplacedError:
            self.replaced = True
            raise
