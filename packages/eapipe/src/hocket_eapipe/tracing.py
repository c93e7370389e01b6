"""Modules that are no chain, cut where torch.fx finds a line between what comes first and what comes later."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import torch
from torch import fx, nn

from hocket.errors import AttachError


class Traced:
    """A model as torch.fx sees it: its operations in their order.

    All stages in between pass on the values that later stages need of earlier ones (a skip connection).

    Args:
        model: with one input.

    Raises:
        AttachError: torch.fx cannot trace it, or it has several inputs.

    Attributes:
        layers: the operations with their names, each with the module that it calls, or an empty one.
    """

    def __init__(self, model: nn.Module) -> None:
        advice = "put its parts into an nn.Sequential"
        try:
            graph = fx.Tracer().trace(model)
        except Exception as error:
            raise AttachError(
                f"{type(model).__name__} is not an nn.Sequential, and torch.fx cannot trace it ({error}): {advice}"
            ) from error
        self._model = model
        nodes = list(graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder" and node.users]
        if len(inputs) != 1:
            raise AttachError(
                f"{type(model).__name__} has {len(inputs)} inputs, but a stage passes on one value: {advice}, and "
                "give several tensors as a tuple"
            )
        self._input = inputs[0]
        # Parameters are read where they are used first, so a stage reads only its own.
        self._nodes = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        [self._output] = [node for node in nodes if node.op == "output"]
        self.layers = [(_name(node), _module(model, node)) for node in self._nodes]

    def stages(self, bounds: Sequence[tuple[int, int]]) -> list[nn.Module]:
        """Return a module for each range of operations, which passes on the values that later ranges need."""
        passed = [(self._input,), *(self._live_at(stop) for _, stop in bounds[:-1]), ()]
        return [
            self._stage(self._nodes[start:stop], passed[number], passed[number + 1], number, len(bounds))
            for number, (start, stop) in enumerate(bounds)
        ]

    def _live_at(self, place: int) -> tuple[fx.Node, ...]:
        """Return the values that exist before an operation and are needed by it or later."""
        later = {*self._nodes[place:], self._output}
        earlier = (self._input, *self._nodes[:place])
        return tuple(node for node in earlier if later & node.users.keys())

    def _stage(
        self,
        nodes: Sequence[fx.Node],
        taken: tuple[fx.Node, ...],
        given: tuple[fx.Node, ...],
        number: int,
        num_stages: int,
    ) -> nn.Module:
        graph = fx.Graph()
        value = graph.placeholder("value")
        copies: dict[fx.Node, fx.Node] = {}
        if number == 0:
            copies[self._input] = value
        else:
            copies |= {node: graph.call_function(getitem, (value, i)) for i, node in enumerate(taken)}

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies and node.op == "get_attr":
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in nodes:
            for read in node.all_input_nodes:
                copy_of(read)
            copies[node] = graph.node_copy(node, copy_of)
        if number == num_stages - 1:
            graph.output(fx.map_arg(self._output.args[0], copy_of))
        else:
            graph.output(tuple(copy_of(node) for node in given))
        return _Operations(self._model, graph)


class _Operations(fx.GraphModule):
    """A stage's operations; the parameters are the model's own."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph)
        self.train(root.training)


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _module(model: nn.Module, node: fx.Node) -> nn.Module:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    read = [n for n in node.all_input_nodes if n.op == "get_attr"]
    holder = nn.Module()
    for attribute in read:
        tensor: object = model
        for word in str(attribute.target).split("."):
            tensor = getattr(tensor, word)
        if isinstance(tensor, torch.nn.Parameter):
            holder.register_parameter(attribute.name, tensor)
    return holder
