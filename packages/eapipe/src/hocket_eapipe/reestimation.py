"""BatchNorm statistics of the master, from forwards of the master itself over the last batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules.batchnorm import _BatchNorm

from hocket.api import plain
from hocket_eapipe.runner import Runner

#: The batches over which statistics are averaged; PyTorch's own running averages look back about ten.
_BATCHES = 16


class Reestimation:
    """BatchNorm statistics from the last inputs, whose mean becomes the running statistics.

    Args:
        runner: runs the stages of this rank; drained.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._inputs: deque[plain.Batch] = deque(maxlen=_BATCHES)

    def remember(self, inputs: object) -> None:
        """Keep a batch's inputs, which must not be overwritten."""
        self._inputs.append(inputs)

    def carry_out(self) -> None:
        """Estimate; collective in the pipeline, between two batches."""
        norms = [
            module
            for stage in self._runner.stages
            for module in stage.module.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]
        with _averaging(norms), self._runner.in_evaluation(except_for=norms):
            for inputs in self._inputs:
                self._runner.evaluate(inputs)


@contextmanager
def _averaging(norms: list[_BatchNorm]) -> Iterator[None]:
    """Make running statistics plain means over the batches that follow, where there are any."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    yield
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
