"""Push-sum weights of the segments of an exchange of parameters, and the values that travel with them.

Where a push-sum weight w travels with a segment, the model computes with x / w and the optimizer steps x: the
parameters are multiplied by w before its step and divided by it afterwards (Assran et al. 2019, algorithm 1). For
float16 and bfloat16 parameters x is kept in float32, and the optimizer's changes are added to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.segment.segment import Segment, view_of
from hocket.segment.storage import Pieces

#: The weights, and copies of x where parameters are too short for it, by the index of the segment.
KeptPushSum = tuple[dict[int, float], dict[int, Tensor]]


class PushSum:
    """The push-sum weights of an exchange's segments, and whether parameters hold x or x / w.

    Args:
        places: each segment with the places of its parameters, by its index.
        travels: whether weights travel.

    Attributes:
        weights: of each segment, by its index; empty where none travels.
        biased: the segments whose parameters hold x, and not x / w.
        unrounded: x by the segment's index, where parameters are too short for it.
    """

    def __init__(self, places: Mapping[int, tuple[Segment, Pieces]], *, travels: bool) -> None:
        self._places = places
        self.weights: dict[int, float] = dict.fromkeys(places if travels else (), 1.0)
        self.biased: set[int] = set()
        self.unrounded = {
            i: Unrounded(pieces[0][1], segment.outgoing.dtype)
            for i, (segment, pieces) in places.items()
            if i in self.weights and segment.outgoing.dtype != pieces[0][1].dtype
        }

    def bias(self) -> None:
        """Set parameters to x, which the optimizer steps, in place of x / w, which the model computes with."""
        for index in self.weights.keys() - self.biased:
            self.biased.add(index)
            if index in self.unrounded:
                self.unrounded[index].bias(self.weights[index])
            elif self.weights[index] != 1.0:
                for _, target in self._places[index][1]:
                    target.mul_(self.weights[index])

    def debias(self, index: int) -> None:
        """Set the parameters of segment number `index` to x / w."""
        self.biased.discard(index)
        if index in self.unrounded:
            self.unrounded[index].debias(self.weights[index])
        elif self.weights[index] != 1.0:
            for _, target in self._places[index][1]:
                target.div_(self.weights[index])

    def set(self, weights: dict[int, float], values: Mapping[int, Tensor] | None = None) -> None:
        """Set the weights, with parameters as x / w; no segment may be under way.

        Args:
            weights: by the segment's index.
            values: x, where parameters' dtypes are too short for it.
        """
        self.weights = weights
        self.biased = set()
        for index, value in (values or {}).items():
            self.unrounded[index].value.copy_(value)

    def keep(self) -> KeptPushSum:
        """Return the weights and values, for `set`."""
        return dict(self.weights), {i: unrounded.value.clone() for i, unrounded in self.unrounded.items()}

    def weights_by_name(self) -> dict[str, float]:
        """Return the weight of each parameter."""
        places = [(weight, self._places[index][0]) for index, weight in self.weights.items()]
        return {span.name: weight for weight, segment in places for span in segment.spans}

    def values_by_name(self) -> dict[str, Tensor]:
        """Return views of x where parameters' dtypes are too short for it, by parameter."""
        return {
            span.name: view_of(unrounded.value, span)
            for index, unrounded in self.unrounded.items()
            for span in self._places[index][0].spans
        }

    def load(self, weights: Mapping[str, float], values: Mapping[str, Tensor]) -> None:
        """Continue from results of `weights_by_name` and `values_by_name`, with parameters as x / w."""
        firsts = {index: self._places[index][0].spans[0].name for index in self.weights}
        self.set({index: weights[name] for index, name in firsts.items()})
        for name, value in self.values_by_name().items():
            value.copy_(values[name])


class Unrounded:
    """The value x of a segment in full precision; its parameters hold x, or x / w, rounded.

    Rounded to the parameter's own dtype in every round, as x, as x / w and as x again, it would drift away.

    Args:
        parameters: flat, of a shorter dtype.
        dtype: of x.

    Attributes:
        value: x, flat.
    """

    def __init__(self, parameters: Tensor, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self.value = parameters.to(dtype)

    def bias(self, weight: float) -> None:
        """Turn parameters from x / w into x, and take over changes that were written into them."""
        written = self._parameters != (self.value / weight).to(self._parameters.dtype)
        self.value = torch.where(written, self._parameters.to(self.value.dtype) * weight, self.value)
        self.show()

    def step(self) -> Tensor:
        """Add the optimizer's change of the parameters, which hold x, to x, and return it."""
        self.value += self._parameters.to(self.value.dtype) - self.value.to(self._parameters.dtype)
        return self.value

    def debias(self, weight: float) -> None:
        """Turn parameters from x into x / w."""
        self.step()
        self._parameters.copy_(self.value / weight)

    def show(self) -> None:
        """Set parameters to x, rounded."""
        self._parameters.copy_(self.value)
