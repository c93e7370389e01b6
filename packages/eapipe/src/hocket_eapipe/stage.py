"""One stage at work: the passes of its batches, under its weight policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from hocket.api import Loss, ReplicaSession, draws, plain
from hocket_eapipe.passing import detached
from hocket_eapipe.weights import Binding, Weights


@dataclass(frozen=True)
class StagePosition:
    """The place of a stage, for errors and random draws.

    Attributes:
        title: its number, the number of stages, and its modules.
        stage: its number, from 0.
        rank: its holder.
        pipeline: the number of its pipeline, from 0.
        seed: the seed of its modules' draws.
    """

    title: str
    stage: int
    rank: int
    pipeline: int
    seed: int


@dataclass
class _Pending:
    """A forward whose backward is to come.

    Attributes:
        inputs: the tensors of the input that get a gradient.
        outputs: those of the output that have one, or the loss.
        binding: the tensors that the forward read.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    binding: Binding


class Stage:
    """The stage's module under a weight policy; a batch may come in several micro-batches.

    Attributes:
        module: its parameters are the newest values, or the master's.
        session: over all ranks that hold the stage; None where it has no trainable parameters.
        weights: the weights that its passes read.
        place: its place, for errors and draws.
    """

    def __init__(
        self, module: nn.Module, session: ReplicaSession | None, weights: Weights, place: StagePosition
    ) -> None:
        self.module = module
        self.session = session
        self.weights = weights
        self.place = place
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        # A search for tied weights takes longer than a small layer.
        self._has_ties = len(names) > len(list(module.parameters()))
        self._draws = int(draws.words(1, "dropout", place.seed, place.pipeline, place.stage)[0])
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._gradients: dict[str, Tensor] = {}
        #: The gradients that are the sum of some micro-batches', in memory that nothing else uses.
        self._summed: set[str] = set()

    def forward(self, batch: int, micro: int, value: plain.Batch) -> plain.Batch:
        """Run a forward.

        Args:
            batch, micro: the batch, counted from 1, and the micro-batch, from 0.
            value: the input from the stage before, or from the loader.

        Returns:
            The output without graph, for the next stage.
        """
        with self._naming_itself("forward", batch):
            pending, output = self._run(batch, micro, value)
            pending.outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            self._pending[batch, micro] = pending
            return detached(output)

    def forward_loss(
        self,
        batch: int,
        micro: int,
        value: plain.Batch,
        target: plain.Batch,
        loss: Loss,
        share: float,
        weight: float,
    ) -> tuple[Tensor, plain.Batch]:
        """Run the last stage's forward, and the loss.

        Args:
            target: the batch's.
            share: the micro-batch's share of the batch's samples.
            weight: the factor of its gradient.

        Returns:
            The loss times the share, and the output, both without graph.
        """
        with self._naming_itself("forward", batch):
            pending, output = self._run(batch, micro, value)
            found = loss(output, target)
            found = found if share == 1.0 else found * share
            pending.outputs = [found if weight == 1.0 else found * weight]
            self._pending[batch, micro] = pending
            return found.detach(), tree_map_only(Tensor, Tensor.detach, output)

    def backward(self, batch: int, micro: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Run a backward, and keep the parameters' gradients for `step`.

        Args:
            gradients: one for each tensor of `forward`'s result that requires one; None at the last stage.

        Returns:
            The gradients of the input, one for each tensor that required one.
        """
        pending = self._pending.pop((batch, micro))
        parameters = pending.binding.parameters
        wanted = [*pending.inputs, *parameters.values()]
        if gradients is None:
            reached: list[tuple[Tensor, Tensor | None]] = [(pending.outputs[0], None)]
        else:
            given = zip(pending.outputs, gradients, strict=True)
            reached = [(output, gradient) for output, gradient in given if gradient is not None]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        with self._naming_itself("backward", batch):
            self.weights.before_backward(batch)
            if reached and wanted:
                outputs, of_outputs = zip(*reached, strict=True)
                found = torch.autograd.grad(outputs, wanted, of_outputs, allow_unused=True)
        of_inputs, of_parameters = found[: len(pending.inputs)], found[len(pending.inputs) :]
        self._accumulate({n: g for n, g in zip(parameters, of_parameters, strict=True) if g is not None})
        return list(of_inputs)

    def _accumulate(self, gradients: dict[str, Tensor]) -> None:
        """Add a micro-batch's gradients to those of the batch."""
        owned = [name for name in gradients if name in self._summed]
        if owned:
            torch._foreach_add_([self._gradients[n] for n in owned], [gradients.pop(n) for n in owned])
        for name, gradient in gradients.items():
            if name in self._gradients:
                # The first sum is a tensor of its own: autograd may have returned one gradient for two parameters.
                self._gradients[name] = self._gradients[name] + gradient
                self._summed.add(name)
            else:
                self._gradients[name] = gradient

    def exchange(self, batch: int, weight: float, divisor: float) -> None:
        """Hand the batch's gradients to the weight policy, once all its micro-batches have had their backward.

        Args:
            weight: the batch's weight among the ranks that hold the stage.
            divisor: the product of all factors of the gradients, where they are exchanged.
        """
        gradients, self._gradients = self._gradients, {}
        self._summed.clear()
        if divisor not in (0.0, 1.0) and self.session is not None and self.session.strategy.gradients:
            gradients = {name: gradient / divisor for name, gradient in gradients.items()}
        with self._naming_itself("update", batch):
            self.weights.exchange(gradients, weight)

    def step(self, batch: int) -> None:
        """Step with the batch's gradients, as they have been exchanged."""
        with self._naming_itself("update", batch):
            self.weights.step(batch)

    def evaluate(self, value: plain.Batch) -> plain.Batch:
        """Run the module as it is, without graph."""
        with torch.no_grad():
            return self.module(value)

    def state_dict(self) -> plain.Tree:
        """Return its state beside the module's own tensors, while no batch is under way."""
        session = {} if self.session is None else self.session.state_dict()
        return {
            "session": {key: session[key] for key in session if key != "model"},
            "weights": self.weights.state_dict(),
        }

    def load_state_dict(self, state: plain.Tree, where: str) -> None:
        """Continue from the result of `state_dict`; `where` names its origin in errors."""
        if self.session is not None:
            self.session.replica_state.load_beside_model(
                state["session"].__getitem__, f"{where}: {self.place.title}"
            )
        self.weights.load_state_dict(state["weights"])

    def _run(self, batch: int, micro: int, value: plain.Batch) -> tuple[_Pending, plain.Batch]:
        binding = self.weights.forward(batch)
        leaves, _ = tree_flatten(value)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        # A module may overwrite its input, which autograd refuses for leaves.
        given = tree_map_only(Tensor, _passed, value)
        with _seeded(self._draws, batch, micro), torch.enable_grad():
            if binding.are_modules:
                output = self.module(given)
            else:
                tensors: dict[str, Tensor] = {**binding.parameters, **binding.buffers}
                output = functional_call(self.module, tensors, (given,), tie_weights=self._has_ties)
        return _Pending(inputs, [], binding), output

    @contextmanager
    def _naming_itself(self, what: str, batch: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in the {what} of batch {batch} at {self.place.title}, on rank {self.place.rank}")
            raise


class _Passed(torch.autograd.Function):
    """The identity, as a tensor that is no leaf."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def _passed(x: Tensor) -> Tensor:
    passed: Tensor = _Passed.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]
    return passed


@contextmanager
def _seeded(drawn: int, batch: int, micro: int) -> Iterator[None]:
    """Make modules' draws (dropout) depend on stage and batch alone, whatever else this process draws.

    Args:
        drawn: a word of the stage's own.
        batch, micro: the batch and micro-batch of the forward.
    """
    # The finalizer of SplitMix64; torch's generator looks at the lower half alone.
    word = (drawn + (batch << 16) + micro) * 0x9E3779B97F4A7C15 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    seed = (word ^ word >> 32) & 0xFFFFFFFF
    # Not torch.manual_seed: it records its caller for each kind of device that is not in use, in a millisecond.
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
