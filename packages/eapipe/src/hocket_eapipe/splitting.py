"""A model as a chain of layers, and the chain cut into stages of about equal cost.

`nn.Sequential` is such a chain; any other module is traced by torch.fx (see `tracing`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from hocket.api import plain
from hocket.errors import AttachError, suggest
from hocket_eapipe.configuration import Balance

# Repetitions of a layer's timing; the fastest counts.
_REPETITIONS = 3


class Chain(nn.Module):
    """A chain of some of a model's modules, under the names that they have in the model.

    Args:
        layers: their names and modules; they may belong to another module, too.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names = [name for name, _ in layers]
        for name, layer in layers:
            # A module's own names have no dots.
            self.add_module(name.replace(".", "/"), layer)

    def forward(self, value: plain.Batch) -> plain.Batch:
        for layer in self._modules.values():
            assert layer is not None
            value = layer(value)
        return value


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return a chain's layers with their names, those of nested chains in their place; None if it is no chain."""
    if not _is_chain(model):
        return None
    found = []
    for name, child in model.named_children():
        inner = layers_of(child)
        if inner is None or child._forward_hooks or child._forward_pre_hooks:
            found.append((name, child))
        else:
            found += [(f"{name}.{rest}", layer) for rest, layer in inner]
    return found


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def balanced_cuts(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the cuts of a chain that make the most expensive stage as cheap as can be.

    Among equally good cuts those are taken in which costs are most equal, then those that come late, so that layers
    without cost stay with those before them.

    Args:
        costs: the layers' costs, 0 or more.
        num_stages: 1 to len(costs).

    Returns:
        The first layer of each stage but the first, increasing: num_stages - 1 numbers.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # The best cuts of the first i layers into stages: the most expensive stage, the sum of squares, and for each number
    # of stages the start of the last one.
    best = [(sums[stop], sums[stop] ** 2) for stop in range(len(costs) + 1)]
    last_starts: list[list[int]] = []
    for stage in range(1, num_stages):
        following = list(best)
        starts = [0] * (len(costs) + 1)
        for stop in range(stage + 1, len(costs) + 1):
            choices = (
                (
                    max(best[start][0], sums[stop] - sums[start]),
                    best[start][1] + (sums[stop] - sums[start]) ** 2,
                    -start,
                )
                for start in range(stage, stop)
            )
            largest, squares, start = min(choices)
            following[stop], starts[stop] = (largest, squares), -start
        best = following
        last_starts.append(starts)
    cuts, stop = [], len(costs)
    for starts in reversed(last_starts):
        stop = starts[stop]
        cuts.append(stop)
    return cuts[::-1]


def split(model: nn.Module, num_stages: int, balance: Balance, cuts: Sequence[str] | None) -> list[nn.Module]:
    """Cut a model into stages, which share its modules.

    Args:
        model: a chain (`nn.Sequential`, nested ones too), or a module that torch.fx can trace.
        num_stages: N.
        balance: the quantity that stages share out about equally.
        cuts: the layers, by name, with which the second, third, ... stage begins; where given, `balance` is not used.

    Raises:
        AttachError: there are fewer layers than stages, a cut is no layer's name, a parameter belongs to two stages, or
            the model cannot be traced.
    """
    from hocket_eapipe.tracing import Traced

    layers = layers_of(model)
    traced = None if layers is not None else Traced(model)
    named = layers if layers is not None else traced.layers  # type: ignore[union-attr]
    if len(named) < num_stages:
        raise AttachError(
            f"the model has {len(named)} layers, too few for {num_stages} stages: use at most {len(named)} stages, "
            "or a model of smaller modules"
        )
    if cuts is None:
        costs = [1.0 if balance is Balance.LAYERS else _num_parameters(layer) for _, layer in named]
        starts = balanced_cuts(costs, num_stages)
    else:
        starts = _starts(cuts, [name for name, _ in named], num_stages)
    bounds = list(pairwise([0, *starts, len(named)]))
    if traced is not None:
        stages: list[nn.Module] = traced.stages(bounds)
    else:
        stages = [Chain(named[start:stop]) for start, stop in bounds]
    _check_disjoint(model, stages)
    return stages


def _starts(cuts: Sequence[str], names: Sequence[str], num_stages: int) -> list[int]:
    if len(cuts) != num_stages - 1:
        raise AttachError(
            f"cuts names {len(cuts)} layers, but {num_stages} stages need {num_stages - 1}: name the first layer of "
            "each stage except the first"
        )
    starts = []
    for cut in cuts:
        begins = [place for place, name in enumerate(names) if name == cut or name.startswith(f"{cut}.")]
        if not begins:
            raise AttachError(f"cuts: {cut!r} is not a layer of the model.{suggest(cut, names)}")
        starts.append(begins[0])
    if sorted(set(starts)) != starts or (starts and starts[0] == 0):
        raise AttachError(
            f"cuts: {', '.join(cuts)} are not in the order of the model, or name its first layer"
        )
    return starts


def _num_parameters(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _check_disjoint(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    owners: dict[int, int] = {}
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for number, stage in enumerate(stages):
        for tensor in (*stage.parameters(), *stage.buffers()):
            first = owners.setdefault(id(tensor), number)
            if first != number:
                raise AttachError(
                    f"{names[id(tensor)]} belongs to stages {first} and {number} (tied weights?), but stages cannot "
                    "share weights: untie it, or choose cuts that keep all its users in one stage"
                )


@torch.no_grad()
def measured_cuts(model: nn.Sequential, example: plain.Batch, num_stages: int) -> tuple[str, ...]:
    """Return `cuts` by which the stages take about equally long, as measured on this machine.

    A forward is timed, of which a backward takes about twice as long in every layer. The model is called in its mode,
    and BatchNorm's statistics see the example.

    Args:
        model: a chain.
        example: an input.
        num_stages: N.

    Raises:
        AttachError: the model is no chain, or has fewer layers than stages.
    """
    layers = layers_of(model)
    if layers is None or len(layers) < num_stages:
        raise AttachError(f"measured_cuts needs an nn.Sequential of {num_stages} layers or more")
    costs, value = [], example
    for _, layer in layers:
        fastest = float("inf")
        for _ in range(_REPETITIONS):
            start_s = time.perf_counter()
            output = layer(value)
            fastest = min(fastest, time.perf_counter() - start_s)
        costs.append(fastest)
        value = output
    return tuple(layers[start][0] for start in balanced_cuts(costs, num_stages))
