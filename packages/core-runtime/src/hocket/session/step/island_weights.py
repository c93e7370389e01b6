"""The weights of batches where the ranks of an island read different ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.errors import SessionError
from hocket.session.island import Island
from hocket.session.step.state import StepState
from hocket.session.step.weights import BatchWeights, Contribution
from hocket.session.torch_internals import outside_of_dynamo


class IslandWeights(BatchWeights):
    """The weights of the batches of one step, of this rank and of its island.

    FSDP gives the mean over the island's ranks, and counts them all alike. So the gradient of each rank's output is
    multiplied by its batch's weight: what FSDP gives is the mean over the island's samples, times the island's mean
    weight, which is the replica's weight between islands.

    Args:
        model: its forward hook is this object's.
        parameters: the trainable ones.
        state: the session's.
        island: the island.
        weight: returns the weight of the batch whose forward is under way.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        state: StepState,
        island: Island,
        weight: Callable[[], float],
    ) -> None:
        super().__init__(parameters, state)
        self._island = island
        self._of_island = [1.0]
        self._divided: set[int] = set()

        def weigh_output(module: nn.Module, inputs: object, output: Any) -> Any:
            own = weight()
            return output if own == 1.0 else _weighed(output, own)

        self._hook = model.register_forward_hook(outside_of_dynamo(weigh_output))

    def begin_batch(self, weight: float) -> None:
        self._outside = False
        if not self._state.accumulated:
            self._weights, self._of_island = [], []
            self._divided.clear()
        self._weights.append(weight)
        # As many ranks hold each share of the samples.
        self._of_island.append(self._island.sum([weight])[0] / self._island.size)
        self._total_before = self.total
        self.total += weight
        self._counted = True

    def leave_out(self) -> None:
        self._weights[-1] = self._of_island[-1] = 0.0
        self.total = self._total_before

    @property
    def any_counts(self) -> bool:
        return any(self._of_island)

    def contribution(self) -> Contribution:
        mean = sum(self._of_island) / len(self._of_island)
        return Contribution(mean, 1.0) if mean else Contribution(0.0, 0.0, {})

    def drop_repetition(self, parameters: Iterable[Tensor]) -> None:
        """Divide this island's own gradients by its weight, for strategies that send none; once in a step."""
        weight = self.contribution().weight
        for parameter in parameters if weight != 1.0 else ():
            if id(parameter) in self._divided or parameter.grad is None:
                continue
            self._divided.add(id(parameter))
            if weight:
                parameter.grad.div_(weight)
            else:
                parameter.grad = None

    def end_step(self) -> None:
        super().end_step()
        self._divided.clear()

    def _reset(self) -> None:
        super()._reset()
        self._of_island = [1.0]

    def unhook(self) -> None:
        super().unhook()
        self._hook.remove()


class _Weighed(Function):
    """An output as it is, whose gradient counts `weight` times."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient] = gradients
        return (gradient * ctx.weight if ctx.weight else gradient.new_zeros(gradient.shape)), None


def _weighed(output: Any, weight: float) -> Any:
    """Return a model's output with weighed gradients.

    Outputs are replaced and not hooked: a loss within the output computes from the logits beside it, whose gradient
    would be weighed twice.

    Raises:
        SessionError: no tensor is found in it.
    """
    found = False

    def within(value: Any) -> Any:
        leaves, structure = tree_flatten(value)
        return tree_unflatten(list(map(weighed, leaves)), structure)

    def weighed(leaf: Any) -> Any:
        nonlocal found
        if isinstance(leaf, Tensor):
            found = True
            return _Weighed.apply(leaf, weight) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: within(getattr(leaf, name)) for name in fields})
        return leaf

    replaced = within(output)
    if not found:
        raise SessionError(
            f"a batch has weight {weight:g}, but Hocket finds no tensor to weight in the model's output, "
            f"{type(output).__name__}: return tensors, or mappings, sequences or dataclasses of tensors"
        )
    return replaced
