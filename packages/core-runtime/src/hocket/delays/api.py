"""The interface of delays, pure functions from the step to every rank's seconds, and the time that computing takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.configured import Configured


class Delays(Configured, ABC):
    """The delay of each rank in each step, before its forward.

    A frozen dataclass whose fields are its configuration. It has no state, and depends only on arguments that are equal
    on every rank, so that all ranks know all delays without a message, and a resumed run has those of an uninterrupted
    one.
    """

    @abstractmethod
    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        """Return every rank's delay in a step, in seconds, float64 [size], each finite and 0 or more.

        Args:
            step: counted from 0, the run's own.
            size: number of ranks; `check_size` must accept it.
            seed: the run's, for random delays; 0 to 2**64 - 1.
        """

    def check_size(self, size: int) -> None:
        """Refuse a number of ranks that these delays are not defined for.

        Raises:
            ValueError: they are not defined for it; says for which numbers they are.
        """


def check_seconds(name: str, value: float) -> None:
    """Refuse a value that is no delay in seconds.

    Raises:
        ValueError: it is negative, infinite or not a number; the message begins with `name`.
    """
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; allowed: 0 or more, finite")


@dataclass(frozen=True)
class ComputeModel:
    """A model of computing time for the virtual clock, where no time passes by itself.

    A step takes step_s + element_s n seconds for a batch whose inputs have n elements, padding included.

    So batches of longer sequences take longer, as in reality. A third of it is forward and two thirds are backward,
    shared by layers in proportion to their trainable values, where the strategy overlaps exchanges with them.

    Attributes:
        step_s: computing time of every step, in seconds; 0 or more.
        element_s: additional seconds for each element of the inputs; 0 or more.
    """

    step_s: float = 0.0
    element_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("step_s", self.step_s)
        check_seconds("element_s", self.element_s)

    def seconds(self, num_elements: int) -> float:
        """Return the seconds of a step whose batch's inputs have `num_elements` elements."""
        return self.step_s + self.element_s * num_elements
