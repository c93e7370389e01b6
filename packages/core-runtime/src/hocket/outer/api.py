"""The interfaces of outer optimizers and merges: what becomes of an exchange of parameters when it has come.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105,
algorithm 1: outer parameters φ that all ranks hold, of which each sends its distance, φ - θ, from time to time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hocket.configured import Configured

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Merge", "Outer"]


class Outer(Configured, ABC):
    """How outer parameters step; a frozen dataclass whose fields are its configuration.

    What is combined is each rank's distance φ - θ, positive like a gradient: a step goes against it. Between steps
    the outer parameters φ are kept, flat for each segment, in float32 or the parameters' longer dtype.
    """

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of what it keeps between steps besides φ: tensors of φ's shape and dtype, at first 0."""
        return ()

    @property
    def mixes(self) -> bool:
        """Whether outer parameters differ between ranks, which send them behind the distances to know their mean."""
        return False

    @property
    def additive(self) -> bool:
        """Whether two steps come to one by the sum of their distances, so that it does not matter when they come."""
        return False

    @abstractmethod
    def step(
        self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], mean: Tensor | None = None
    ) -> None:
        """Step the outer parameters of one segment, in place; pure, so that equal ones stay equal.

        Args:
            parameters: φ, flat [numel].
            gradient: the ranks' mean distance, of the same shape and dtype; may be used as scratch.
            state: what `remembers` names, to be changed in place.
            mean: of the φ of those ranks whose distances are in `gradient`, as it was when they were sent, of the same
                shape and dtype; may be used as scratch. None unless `mixes`.
        """


class Merge(Configured, ABC):
    """What becomes of parameters when what was sent has come; a frozen dataclass whose fields are its configuration."""

    @property
    @abstractmethod
    def takes_all(self) -> bool:
        """Whether parameters that have not changed since they were sent become what has come, and nothing else."""

    @property
    def needs_sent(self) -> bool:
        """Whether it has to know what the parameters were when they were sent."""
        return False

    @abstractmethod
    def merge(self, parameters: Tensor, come: Tensor, sent: Tensor | None) -> None:
        """Change parameters in place.

        Args:
            parameters: θ as it is now, flat.
            come: the outer parameters, or the combination where there are none, flat, in the dtype of the wire.
            sent: θ as it was when it was sent, like `come`, and may be used as scratch; None unless `needs_sent`.
        """
