"""How long computing takes on the virtual clock, where no time passes by itself."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.delays.api import check_seconds

__all__ = ["ComputeModel"]


@dataclass(frozen=True)
class ComputeModel:
    """A step takes step_s + element_s n seconds for a batch whose inputs have n elements, padding included.

    So batches of longer sequences take longer, as they do in truth. All of it passes before forward: what an overlap
    with backward hides is not imitated.

    Attributes:
        step_s: seconds of any step; 0 or more.
        element_s: seconds for each element of the inputs; 0 or more.
    """

    step_s: float = 0.0
    element_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("step_s", self.step_s)
        check_seconds("element_s", self.element_s)

    def seconds(self, num_elements: int) -> float:
        """Return how long a step takes for so many elements of its batch's inputs."""
        return self.step_s + self.element_s * num_elements
