"""State of RedSync for a segment, kept between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.api import OptimizerTerms, State
from hocket_redsync.kernels import Kernels, Memory, Update, kernels_for
from hocket_redsync.kernels.api import NOTHING_PASSES

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, ParameterSpan, Segment
    from hocket_redsync.sending import Sending

#: Runs of parameters side by side that take one step together: their terms, the first and the last position; and by
#: weight decay the terms and positions of those that have it.
SharedTerms = tuple[list[tuple[OptimizerTerms, int, int]], dict[float, list[tuple[OptimizerTerms, int]]]]


class ResidualState(State):
    """The state of a segment: V, u, and for each parameter the floor of its next selection.

    Attributes:
        kernels: those of the segment's device.
        floors: int64 [parameters, 2], the keys from which candidates are picked; the second for the smallest.
        ages: int64 [parameters], the rounds in which a floor has served as the threshold of `sampled`.
        elsewhere: the positions of parameters that the collective sends whole, and messages leave out.
        terms, scale: the optimizer's terms in this round, and the factor that G has been multiplied by.
        shared_terms: those of the parameters elsewhere; None where terms have changed since.
    """

    def __init__(self, segment: Segment, sendings: Sequence[Sending], *, corrects_momentum: bool) -> None:
        import torch

        segment.check_indexable()
        self.kernels: Kernels = kernels_for(segment.outgoing.device)
        data = segment.outgoing[: segment.numel]
        nothing = NOTHING_PASSES[data.element_size()]
        self._residual = torch.zeros_like(data)
        self._velocity = torch.zeros_like(data) if corrects_momentum else None
        #: Each parameter's way of sending, and its share of the memory.
        self.sendings = sendings
        self.memories = [self._memory(segment, span) for span in segment.spans]
        self.floors = torch.full((len(segment.spans), 2), nothing, dtype=torch.int64)
        self.ages = torch.zeros(len(segment.spans), dtype=torch.int64)
        self.elsewhere: frozenset[int] = frozenset()
        self.terms: Sequence[OptimizerTerms | None] = ()
        self.scale = 0.0
        self.shared_terms: SharedTerms | None = None

    @property
    def residual(self) -> Tensor:
        return self._residual

    @property
    def momentum(self) -> Tensor | None:
        return self._velocity

    def take(self, terms: Sequence[OptimizerTerms | None], scale: float) -> None:
        if terms is not self.terms:
            self.shared_terms = None
        self.terms, self.scale = terms, scale

    def take_back(self, indices: Array, values: Array) -> None:
        import torch

        super().take_back(indices, values)
        places, back = (torch.from_numpy(each).to(self._residual.device) for each in (indices, values))
        self._residual.index_add_(0, places, back)

    def tensors(self) -> dict[str, Tensor]:
        velocity = {} if self._velocity is None else {"momentum": self._velocity}
        return {"residual": self._residual, **velocity, "floors": self.floors, "ages": self.ages}

    def _memory(self, segment: Segment, span: ParameterSpan) -> Memory:
        place = slice(span.start, span.stop)
        velocity = None if self._velocity is None else self._velocity[place]
        return Memory(segment.outgoing[place], self._residual[place], velocity, span.start)

    def update(self, position: int, memory: Memory) -> Update:
        """Return this round's update of the residual of parameter `position`, whose memory is `memory`."""
        terms = self.terms[position] if self.terms else None
        if terms is None:  # the optimizer does it, or the parameter has no gradient: G is 0, u stays as it is
            return Update()
        if terms.continues and terms.momentum and memory.velocity is not None:
            memory.velocity.add_(memory.given)
            if terms.nesterov:
                memory.given.mul_(1 + terms.momentum)
            return Update()
        decay = self.decay(terms)
        return Update(terms.momentum, terms.nesterov, decay, self.decayed(terms) if decay else None)

    def decay(self, terms: OptimizerTerms) -> float:
        """Return the factor of x in what is added to G."""
        return terms.weight_decay * self.scale

    def decayed(self, terms: OptimizerTerms) -> Tensor:
        """Return x, flat, in the order and dtype of the residual."""
        x = terms.parameter.detach()
        return x.as_strided((x.numel(),), (1,), x.storage_offset()).to(self._residual.dtype)
