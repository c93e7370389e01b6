"""The interfaces of outer optimizers and merges, which use the result of an exchange of parameters.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105,
algorithm 1: all ranks hold outer parameters φ, and each sends its distance from them, φ - θ, from time to time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hocket.configured import Configured

if TYPE_CHECKING:
    from torch import Tensor


class Outer(Configured, ABC):
    """An optimizer of outer parameters; a frozen dataclass whose fields are its configuration.

    Each rank's distance φ - θ is combined, positive like a gradient: a step goes against it. Between steps
    the outer parameters φ are kept, flat for each segment, in float32 or the parameters' longer dtype.
    """

    @property
    def remembers(self) -> tuple[str, ...]:
        """Return the names of its state besides φ: tensors of φ's shape and dtype, at first 0."""
        return ()

    @property
    def mixes(self) -> bool:
        """Tell whether outer parameters differ between ranks, which then send them behind the distances."""
        return False

    @property
    def additive(self) -> bool:
        """Tell whether two steps equal one by the sum of their distances, so that their times do not matter."""
        return False

    @abstractmethod
    def step(
        self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], mean: Tensor | None = None
    ) -> None:
        """Step the outer parameters of one segment, in place; pure, so that equal ones stay equal.

        Args:
            parameters: φ, flat [numel].
            gradient: the ranks' mean distance, of the same shape and dtype; may be used as scratch.
            state: the tensors that `remembers` names, changed in place.
            mean: the mean φ, when they were sent, of the ranks whose distances are in `gradient`, of the same shape and
                dtype; may be used as scratch. None unless `mixes`.
        """


class Merge(Configured, ABC):
    """A merge of an exchange's result into parameters; a frozen dataclass whose fields are its configuration."""

    @property
    @abstractmethod
    def takes_all(self) -> bool:
        """Tell whether parameters that have not changed since they were sent become exactly the result."""

    @property
    def needs_sent(self) -> bool:
        """Tell whether it needs the parameters from when they were sent."""
        return False

    @abstractmethod
    def merge(self, parameters: Tensor, received: Tensor, sent: Tensor | None) -> None:
        """Merge a result into parameters, in place.

        Args:
            parameters: the current θ, flat [n].
            received: the outer parameters, or the combination where there are none, flat [n], in the wire's dtype.
            sent: θ when it was sent, like `received`; may be used as scratch; None unless `needs_sent`.
        """
