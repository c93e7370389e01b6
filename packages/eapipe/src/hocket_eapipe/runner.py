"""The stages of one rank at work: the order of their passes, and the messages from and to other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hocket.api import Loss, StepResult, plain
from hocket.errors import HocketError
from hocket_eapipe.passing import MessageReceiver, MessageSender
from hocket_eapipe.schedule import warm_up
from hocket_eapipe.stage import Stage


@dataclass
class _BatchInFlight:
    """A batch between its first forward and its last backward on this rank.

    Attributes:
        number: counted from 1.
        weights: the weight of each call that brought a part of it.
        rounds: the rounds of the messages of each of its micro-batches.
    """

    number: int
    weights: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """The weight of the batch among pipelines."""
        return sum(self.weights) / len(self.weights)


@dataclass
class StageNeighbours:
    """The ranks before and after this one in its pipeline; None at its ends.

    Attributes:
        activations_from, activations_to: messages of forwards.
        gradients_from, gradients_to: messages of backwards.
    """

    activations_from: MessageReceiver | None = None
    activations_to: MessageSender | None = None
    gradients_from: MessageReceiver | None = None
    gradients_to: MessageSender | None = None

    def release(self) -> None:
        """Free the memory of sends that have ended."""
        for sender in (self.activations_to, self.gradients_to):
            if sender is not None:
                sender.release()

    def wait(self) -> None:
        """Wait until everything has left this rank."""
        for sender in (self.activations_to, self.gradients_to):
            if sender is not None:
                sender.wait()


class Runner:
    """The runner of the programs of this rank's stages, batch by batch.

    With each batch every stage runs its forward, then the backward that its program says comes next (`schedule`). The
    last stage is where the loss is: its rank has the result of a batch in the call that brings it. A batch that
    comes in several calls, which accumulate, has its backward after the last of them.

    Args:
        stages: neighbouring ones, in order.
        num_stages: N.
        neighbours: the messages from and to the ranks before and after this one.
        flushes: true: a batch's backward follows its forward at every stage, so that none is under way between two.
        micro_batches: the number that a batch is cut into; 1 unless each is flushed.
        clip: called between the exchange of a batch's gradients and the steps of all stages; None unless each batch is
            flushed, as only then all of a batch's gradients are there at one time.

    Attributes:
        batches: the number of batches that have come.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        num_stages: int,
        neighbours: StageNeighbours,
        *,
        flushes: bool = False,
        micro_batches: int = 1,
        clip: Callable[[], None] | None = None,
    ) -> None:
        self.stages = stages
        self._neighbours = neighbours
        self._micro_batches = micro_batches
        self._is_first = stages[0].place.stage == 0
        self._is_last = stages[-1].place.stage == num_stages - 1
        self._ahead = [0 if flushes else warm_up(stage.place.stage, num_stages) for stage in stages]
        #: The batches of each stage whose backward is to come.
        self._under_way: list[deque[_BatchInFlight]] = [deque() for _ in stages]
        self._clip = clip
        #: The batch whose further parts are to come.
        self._begun: _BatchInFlight | None = None
        self._num_rounds = 0
        #: Gradients of what a stage of this rank has handed to the next one, which is here, too.
        self._handed: dict[tuple[int, int, int], list[Tensor | None]] = {}
        self.batches = 0

    @property
    def drained(self) -> bool:
        """True if no batch is under way on this rank."""
        return not any(self._under_way)

    @property
    def accumulates(self) -> bool:
        """True if further parts of a batch are to come."""
        return self._begun is not None

    def run(
        self, batch: plain.Batch, loss: Loss, weight: float, *, is_last: bool = True
    ) -> StepResult | None:
        """Run the forwards of one batch, or a part of it, and the backwards whose turn it is.

        Args:
            batch: (input, target); looked at by the first stage, the other one by the last.
            loss: the mean over a (micro-)batch; of a batch in several parts, its share of the batch's.
            weight: the batch's weight among pipelines.
            is_last: true: no further part of the batch comes.
        """
        if self._begun is None:
            self.batches += 1
        begun = self._begun or _BatchInFlight(self.batches)
        # A batch that came as a whole is weighted at its exchange; parts of a batch, before they are added up.
        factor = 1.0 if is_last and not begun.weights else weight
        begun.weights.append(weight)
        result = self._forwards(begun, batch, loss, factor)
        self._begun = None if is_last else begun
        if not is_last:
            return result
        self._pass_on(begun)
        return result

    def leave_out(self) -> None:
        """Let a batch pass that computes nothing, on all ranks of the pipeline: it steps with what other ones give."""
        self.batches += 1
        for stage in self.stages:
            stage.weights.forward(self.batches)
        self._pass_on(_BatchInFlight(self.batches, weights=[0.0]))

    def _pass_on(self, begun: _BatchInFlight) -> None:
        """Run the backwards whose turn it is after a batch's forwards."""
        for under_way in self._under_way:
            under_way.append(begun)
        for position in reversed(range(len(self.stages))):
            if len(self._under_way[position]) > self._ahead[position]:
                self._backward(position)
        if self._clip is not None:
            self._clip()
            for stage in reversed(self.stages):
                stage.step(begun.number)

    def drain(self) -> None:
        """Run the backwards of all batches under way: the final phase; the other ranks of the pipeline do, too."""
        while not self.drained:
            for position in reversed(range(len(self.stages))):
                if self._under_way[position]:
                    self._backward(position)
        self._neighbours.wait()
        for stage in self.stages:
            stage.weights.drained()

    def evaluate(self, inputs: object) -> None:
        """Run all stages' modules as they are, without graph; the pipeline is drained, and all its ranks do it."""
        value = inputs
        if self._neighbours.activations_from is not None:
            value = self._neighbours.activations_from.receive(0)
        for stage in self.stages:
            value = stage.evaluate(value)
        if self._neighbours.activations_to is not None:
            self._neighbours.activations_to.send(value, 0)
            self._neighbours.activations_to.wait()

    @contextmanager
    def in_evaluation(self, except_for: Sequence[nn.Module]) -> Iterator[None]:
        """Put the modules into evaluation mode, and some into training mode; back again at the end."""
        modes = {module: module.training for stage in self.stages for module in stage.module.modules()}
        for module in modes:
            module.training = False
        for module in except_for:
            module.training = True
        yield
        for module, training in modes.items():
            module.training = training

    def _forwards(
        self, begun: _BatchInFlight, batch: plain.Batch, loss: Loss, factor: float
    ) -> StepResult | None:
        number, results = begun.number, []
        for inputs, target, share in self._parts(batch):
            self._num_rounds += 1
            value, round, micro = inputs, self._num_rounds, len(begun.rounds)
            begun.rounds.append(round)
            if not self._is_first:
                assert self._neighbours.activations_from is not None
                value = self._neighbours.activations_from.receive(round)
            for stage in self.stages[:-1] if self._is_last else self.stages:
                value = stage.forward(number, micro, value)
            if self._is_last:
                last = self.stages[-1]
                results.append(last.forward_loss(number, micro, value, target, loss, share, factor))
            else:
                assert self._neighbours.activations_to is not None
                self._neighbours.activations_to.send(value, round)
        return _joined(results) if results else None

    def _backward(self, position: int) -> None:
        """Run a stage's next backward over all micro-batches, exchange, and step unless all stages do so together."""
        stage, batch = self.stages[position], self._under_way[position].popleft()
        is_last = position == len(self.stages) - 1
        for micro, round in enumerate(batch.rounds):
            gradients: list[Tensor | None] | None
            if not is_last:
                gradients = self._handed.pop((position, batch.number, micro))
            elif self._is_last:
                gradients = None
            else:
                assert self._neighbours.gradients_from is not None
                gradients = self._neighbours.gradients_from.receive(round)
            self._neighbours.release()
            found = stage.backward(batch.number, micro, gradients)
            if position > 0:
                self._handed[position - 1, batch.number, micro] = found
            elif not self._is_first:
                assert self._neighbours.gradients_to is not None
                self._neighbours.gradients_to.send(found, round)
        stage.exchange(batch.number, batch.weight, 1.0 if len(batch.weights) == 1 else batch.weight)
        if self._clip is None:
            stage.step(batch.number)

    def _parts(self, batch: plain.Batch) -> list[tuple[plain.Batch, plain.Batch, float]]:
        """Cut a batch into micro-batches: (input, target, share of the samples)."""
        inputs, target = batch
        if self._micro_batches == 1:
            return [(inputs, target, 1.0)]
        sizes = {
            len(leaf) for leaf in tree_leaves((inputs, target)) if isinstance(leaf, Tensor) and leaf.dim()
        }
        if len(sizes) != 1:
            raise HocketError(
                f"batch {self.batches}: cannot cut it into {self._micro_batches} micro-batches, because the first "
                f"axes of its tensors have {' and '.join(map(str, sorted(sizes))) or 'no'} samples: use "
                "micro_batches: 1, or tensors of equal batch size"
            )
        [size] = sizes
        cuts = [size * part // self._micro_batches for part in range(self._micro_batches + 1)]
        spans = [(start, stop) for start, stop in pairwise(cuts) if stop > start]
        return [
            (_slice(inputs, start, stop), _slice(target, start, stop), (stop - start) / size)
            for start, stop in spans
        ]


def _slice(value: plain.Batch, start: int, stop: int) -> plain.Batch:
    return tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) and x.dim() else x, value)


def _joined(results: Sequence[tuple[Tensor, plain.Batch]]) -> StepResult:
    """Return a batch's result from those of its micro-batches."""
    if len(results) == 1:
        return StepResult(*results[0])
    flat = [tree_flatten(output) for _, output in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [torch.cat(c) if isinstance(c[0], Tensor) and c[0].dim() else c[0] for c in columns]
    return StepResult(torch.stack([loss for loss, _ in results]).sum(), tree_unflatten(leaves, flat[0][1]))
