"""Policies with one set of weights, to which every gradient is applied: naive, PipeDream's two, and flush.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, sec. 3.3 (weight
stashing, vertical sync); Y. Huang et al., "GPipe", 2019 (flush).
"""

from __future__ import annotations

from hocket.api import plain
from hocket_eapipe.optimizers import Follower
from hocket_eapipe.schedule import warm_up
from hocket_eapipe.weights.api import Binding, StagePart, Tensors, Weights, alias, copied


class Newest(Weights):
    """The newest weights are the module's own, and the session's optimizer steps them.

    Attributes:
        applied: the number of batches whose gradients they hold.
    """

    def __init__(self, part: StagePart, follower: Follower) -> None:
        self.applied = 0
        self._part = part
        self._follower = follower
        self._parameters = part.parameters()

    def merge(self) -> None:
        """Write a strategy's exchange for the next forward into the newest weights."""
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

    def state_dict(self) -> plain.Tree:
        return {"applied": self.applied}

    def load_state_dict(self, state: plain.Tree) -> None:
        self.applied = state["applied"]


class Naive(Newest):
    """The newest weights in both passes: other batches overwrite the forward's before the backward.

    The policy shows the effect: the gradient is not that of the loss at any weights.
    """

    def forward(self, batch: int) -> Binding:
        return Binding(self.newest())


class Flush(Newest):
    """The newest weights, which no other batch changes between a batch's forward and its backward."""

    def forward(self, batch: int) -> Binding:
        self.merge()
        return Binding(dict(self._parameters), are_modules=True)


class Stashing(Newest):
    """Weights stashed at each batch's forward, the newest at that time, for both of its passes."""

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
    """One version of the weights for both passes of a batch at every stage.

    It is the newest at the batch's forward at the first stage. It has the gradients of all batches up to t - N (and of
    all that were drained before). The other stages keep it, an older version there than the newest, until all batches
    that are to read it have come and gone.
    """

    def __init__(self, part: StagePart, follower: Follower) -> None:
        super().__init__(part, follower)
        #: Weights by the number of batches whose gradients they hold; the newest is kept as soon as it is there.
        self._versions: dict[int, Tensors] = {}
        #: The number of batches drained when the pipeline was last empty.
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

    def load_state_dict(self, state: plain.Tree) -> None:
        super().load_state_dict(state)
        self.drained()
