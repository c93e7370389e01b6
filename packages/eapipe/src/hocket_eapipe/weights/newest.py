"""Policies with one set of weights, to which every gradient is applied: naive, PipeDream's two, and flush.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, sec. 3.3 (weight
stashing, vertical sync); Y. Huang et al., "GPipe", 2019 (flush).
"""

from __future__ import annotations

from typing import Any

from hocket_eapipe.optimizers import Follower
from hocket_eapipe.schedule import warm_up
from hocket_eapipe.weights.api import Binding, StagePart, Tensors, Weights, alias, copied

__all__ = ["Flush", "Naive", "Newest", "Stashing", "VerticalSync"]


class Newest(Weights):
    """The newest weights are the module's own, and the session's optimizer steps them.

    Attributes:
        applied: how many batches' gradients they hold.
    """

    def __init__(self, part: StagePart, follower: Follower) -> None:
        self.applied = 0
        self._part = part
        self._follower = follower
        self._parameters = part.parameters()

    def merge(self) -> None:
        """Write into the newest weights what a strategy has under way for the next forward."""
        self._part.session.phase.parameters.merge_forward()

    def newest(self) -> Tensors:
        """Return the newest weights where they are."""
        self.merge()
        return {name: alias(parameter) for name, parameter in self._parameters.items()}

    def exchange(self, gradients: Tensors, weight: float) -> None:
        session = self._part.session
        session.begin_batch(weight)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.pop(name, None)
        session.exchange_gradients()

    def step(self, batch: int) -> None:
        session = self._part.session
        self._follower.follow()
        session.optimizer.step()
        session.optimizer.zero_grad()
        self.applied += 1

    def state_dict(self) -> dict[str, Any]:
        return {"applied": self.applied}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.applied = state["applied"]


class Naive(Newest):
    """Both passes read the newest weights, which are not the same: what forward read is overwritten before backward.

    That the gradient is then of no function of any weights is what the policy is there to show.
    """

    def forward(self, batch: int) -> Binding:
        return Binding(self.newest())


class Flush(Newest):
    """No weights change between a batch's forward and its backward, as no other batch comes between."""

    def forward(self, batch: int) -> Binding:
        self.merge()
        return Binding(dict(self._parameters), are_modules=True)


class Stashing(Newest):
    """Both passes of a batch read the weights that were the newest at its forward."""

    def __init__(self, part: StagePart, follower: Follower) -> None:
        super().__init__(part, follower)
        #: The batch whose weights were kept last, which are those of all its micro-batches.
        self._kept: tuple[int, Tensors] = (0, {})

    def forward(self, batch: int) -> Binding:
        if batch == self._kept[0]:
            return Binding(self._kept[1])
        newest = self.newest()
        if warm_up(self._part.stage, self._part.num_stages) == 0:
            # At the last stage no update comes between.
            return Binding(newest)
        self._kept = batch, {name: copied(tensor) for name, tensor in newest.items()}
        return Binding(self._kept[1])

    def step(self, batch: int) -> None:
        super().step(batch)
        if batch == self._kept[0]:
            self._kept = 0, {}


class VerticalSync(Newest):
    """Both passes of a batch, at every stage, read the weights that were the newest at its forward at the first stage.

    These have the gradients of all batches up to t - N (and of all that were drained before): at the other stages an
    older version than the newest, which is kept until all batches that are to read it have come and gone.
    """

    def __init__(self, part: StagePart, follower: Follower) -> None:
        super().__init__(part, follower)
        #: Weights by how many batches' gradients they hold; the newest is kept as soon as it is there.
        self._versions: dict[int, Tensors] = {}
        #: How many batches had been drained when the pipeline was last empty.
        self._base = 0

    def forward(self, batch: int) -> Binding:
        version = max(self._base, batch - self._part.num_stages)
        if self.applied not in self._versions:
            self._keep()
        for old in [kept for kept in self._versions if kept < version]:
            del self._versions[old]
        return Binding(self._versions[version])

    def step(self, batch: int) -> None:
        super().step(batch)
        self._keep()

    def _keep(self) -> None:
        self._versions[self.applied] = {name: copied(tensor) for name, tensor in self.newest().items()}

    def drained(self) -> None:
        # The first stage has the gradients of all batches, too.
        self._base = self.applied
        self._versions = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.drained()
