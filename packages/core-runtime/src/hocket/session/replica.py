"""The model in training on one rank, as the phases of its strategy exchange it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hocket.errors import ReplacedError, SessionError
from hocket.segment.staging import is_captured
from hocket.segment.storage import ParameterStorage
from hocket.session.ranks import broadcast_model, broadcast_optimizers, find_ranks
from hocket.session.save.beside import Beside
from hocket.session.step.optimizers import Optimizers
from hocket.session.step.state import StepState
from hocket.session.step.weights import BatchWeights, Contribution
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer

__all__ = ["Replica"]


class Replica:
    """A whole model on this rank, with its optimizers and the weights of its batches; construction is collective.

    Args:
        model, optimizers: the attached ones.
        peer: all ranks.
        lane: among them.
        state: the session's, within its step.
        initial: the rank whose values replicas begin with, as for `hocket.attach`.
        may_skip: whether steps with NaN or Inf are left out.
        lanes_on_device: whether lanes exchange from the model's device.
        statistics: names of buffers that are averaged like BatchNorm's.
        begin_gradients: called before an exchange of gradients (see `GradientSync`).

    Attributes:
        begins_equal: whether all replicas hold the same bits when they begin.
        ranks: all ranks and their hosts.
        storage: the parameters' memory.
        weights: of this rank's batches.
        replaced: whether `check` has raised a ReplacedError, after which the session cannot go on.
        beside: the model's tensors beside its trained parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        peer: Peer,
        lane: Lane,
        state: StepState,
        begin_gradients: Callable[[], Contribution],
        *,
        initial: str,
        may_skip: bool,
        lanes_on_device: bool = False,
        statistics: Sequence[str] = (),
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.lane, self.state, self.begin_gradients = lane, state, begin_gradients
        self.may_skip = may_skip
        self.replaced = False
        self.begins_equal = peer.size == 1 or initial == "rank0"
        if initial == "rank0":
            self._take_from_rank0(peer)
        devices = [p.device for p in model.parameters() if p.requires_grad]
        # One rank alone sends to nobody, and its transport has no such lanes.
        self.ranks = find_ranks(peer, devices[0] if lanes_on_device and peer.size > 1 and devices else None)
        self.storage = ParameterStorage(model, self.ranks.host)
        #: Those but the CPU that parameters lie on.
        self._devices = {p.device for p in self.storage.parameters.values()} - {torch.device("cpu")}
        self.weights = BatchWeights(self.storage.parameters.values(), state)
        self.beside = Beside(model, self.storage.parameters, statistics, self.ranks.peer, self.weights)
        if self.begins_equal:
            self.beside.note_equal()

    def _take_from_rank0(self, peer: Peer) -> None:
        lane = peer.lane("attach")
        broadcast_model(self.model, lane)
        broadcast_optimizers(self.optimizers, peer, lane)
        lane.close()

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
                "the step is being captured as a CUDA graph: the session's hooks would run while it is captured and "
                "never when it is replayed, so that ranks exchanged nothing. Train without a graph"
            )
        try:
            self.storage.check(take_values=take_values)
            self.optimizers.check()
        except ReplacedError:
            self.replaced = True
            raise
