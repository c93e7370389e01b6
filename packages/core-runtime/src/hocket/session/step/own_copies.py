"""Optimizers that keep copies of their own of the weights, which no exchange reaches.

Float32 masters, Lookahead's slow weights, schedule-free's z, ASGD's ax: an average of the ranks' parameters is lost, or
half of it, if the next step starts from such a copy. No optimizer declares one, but its values show it: they are near
the parameter's, where moments and sums are anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hocket.checkpoint.subclasses import is_composite
from hocket.segment.shards import local
from hocket.session.step.optimizers import Optimizers

_log = logging.getLogger("hocket")

#: After so many steps it is looked: some are made in a first step, some when they are first used.
_LOOKS = frozenset({1, 10})
#: What torch's own optimizers keep of gradients, which needs no look: one would wait for a device.
_MOMENTS = frozenset(
    {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "square_avg",
        "grad_avg",
        "sum",
        "acc_delta",
        "prev",
        "step_size",
        "step",
    }
)
# Of each tensor; enough to tell a copy, and soon read.
_MOST_ELEMENTS = 1 << 14
# A copy has nearly the direction of the parameters, and about their length.
_SMALLEST_COSINE = 0.9
_LARGEST_RATIO = 2.0


class OwnCopies:
    """A look at optimizers' states, in the first steps of a session that exchanges parameters.

    Args:
        optimizers: the attached ones.
        rank: this rank; rank 0 warns.
    """

    def __init__(self, optimizers: Optimizers, rank: int) -> None:
        # Which hold others, of which one is hooked.
        self._optimizers = list(dict.fromkeys((*optimizers.called, *optimizers.every)))
        self._rank = rank
        self._steps = 0
        self._has_warned = False

    def after_step(self) -> None:
        """Note a step, and warn once of copies of the weights."""
        self._steps += 1
        if self._has_warned or self._rank or self._steps not in _LOOKS:
            return
        for optimizer in self._optimizers:
            names = copies_of_weights(optimizer)
            if names:
                self._has_warned = True
                _log.warning(
                    "%s keeps its own copy of the weights (%s), which exchanges of parameters do not change: if it "
                    "steps from that copy, the next step undoes the ranks' average. Exchange gradients instead "
                    "(sgd, agd), or use an optimizer that steps the parameters themselves",
                    type(optimizer).__name__,
                    ", ".join(names),
                )
                return


@torch.no_grad()
def copies_of_weights(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's state that nearly equals its parameters, but is not them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = []
    for name, kept in _kept(optimizer, parameters):
        pairs = [(local(p), local(t)) for p, t in kept]
        pairs = [(p, t) for p, t in pairs if t is not p and not is_composite(t)]
        pairs = [(p, t) for p, t in pairs if t.data_ptr() != p.data_ptr()]
        if pairs and _lies_by(pairs):
            found.append(name)
    return sorted(set(found))


def _kept(
    optimizer: Optimizer, parameters: Sequence[Tensor]
) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """Yield tensors of an optimizer's state that could be copies, by name, with their parameters."""
    states = [(parameter, optimizer.state.get(parameter, {})) for parameter in parameters]
    known = _MOMENTS if type(optimizer).__module__.startswith("torch.optim") else frozenset()
    for key in {key for _, state in states if isinstance(state, dict) for key in state} - known:
        pairs = [(p, state.get(key)) for p, state in states if isinstance(state, dict)]
        yield f"state {key!r}", [(p, t) for p, t in pairs if isinstance(t, Tensor) and t.shape == p.shape]
    places = [vars(optimizer), *optimizer.param_groups]
    for key, value in ((key, value) for place in places for key, value in place.items()):
        tensors = _flattened(value) if key not in ("param_groups", "state", "params") else []
        if tensors and [t.shape for t in tensors] == [p.shape for p in parameters]:
            yield repr(key), list(zip(parameters, tensors, strict=True))


def _flattened(value: Any) -> list[Tensor]:
    """Return the tensors of a list of tensors, or of a list of such."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, list | tuple | dict):
        return [tensor for each in values for tensor in _flattened(each)]
    return []


def _lies_by(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether tensors together have nearly the direction and the length of others."""
    sums = torch.zeros(3, dtype=torch.float64)
    for parameter, tensor in pairs:
        own, kept = (
            t.detach().flatten()[:_MOST_ELEMENTS].to("cpu", torch.float64) for t in (parameter, tensor)
        )
        sums += torch.stack([own @ kept, own @ own, kept @ kept])
    product, own_square, kept_square = sums.tolist()
    if not (own_square > 0 and kept_square > 0):
        return False
    ratio = (kept_square / own_square) ** 0.5
    cosine = product / (own_square * kept_square) ** 0.5
    return bool(cosine > _SMALLEST_COSINE and 1 / _LARGEST_RATIO < ratio < _LARGEST_RATIO)
