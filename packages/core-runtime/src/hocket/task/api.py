"""The interface of tasks: the samples, model, loss and metrics of one training problem."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.data import Dataset

from hocket.configured import Configured
from hocket.errors import ConfigError
from hocket.plain import Batch, TreeView

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class TaskData:
    """The samples of a task: map-style datasets of `(inputs, target)` pairs, or of mappings that are both.

    `torch.utils.data.default_collate` makes batches of samples. The model gets a mapping of inputs by name,
    `model(**inputs)`, a tuple's elements one after the other, and anything else as it is.

    Attributes:
        train: the samples to train on.
        valid: the held-out samples, the same on every rank and in every run.

    Raises:
        ConfigError: one of them is empty.
    """

    train: Dataset[Batch]
    valid: Dataset[Batch]

    def __post_init__(self) -> None:
        for name, samples in (("train", self.train), ("valid", self.valid)):
            if isinstance(samples, Sized) and not len(samples):
                raise ConfigError(
                    f"the task's data() has no samples in `{name}`: return samples for training and "
                    "held-out samples"
                )


class Task(Configured, ABC):
    """A training problem, independent of how many ranks train it.

    A task is a frozen dataclass: its fields are its configuration (int, float, str, bool, enums and Optional
    of them, each with a default), and `__post_init__` raises ValueError, naming what is allowed, for a value
    out of range. It holds no state: two calls of a method with the same arguments give equal results.
    """

    @abstractmethod
    def data(self, seed: int) -> TaskData:
        """Return the samples; every rank holds, or can index, all of them.

        Args:
            seed: the run's seed, for tasks that draw their training samples. The held-out samples never
                depend on it.

        Raises:
            UserError: the samples are not on this machine, or are damaged.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, initialised from torch's global generator, which the caller has seeded."""

    @abstractmethod
    def loss(self, output: Batch, target: Batch) -> Tensor:
        """Return the mean loss over a batch.

        Args:
            output: the model's output, [batch, ...].
            target: the batch's targets, [batch, ...]; the whole batch if samples are mappings.

        Returns:
            A scalar of the output's dtype, differentiable.
        """

    def metrics(self, output: Batch, target: Batch) -> dict[str, Tensor]:
        """Return each metric's sum over a batch. The mean over all samples is what results report.

        Args:
            output: as in `loss`.
            target: as in `loss`.

        Returns:
            Scalars by name, such as `{"accuracy": number of correct answers}`; empty if, as in a
            regression, the loss is enough. Results call them `valid_accuracy` and the like.
        """
        return {}

    def torchmetrics(self) -> TreeView:
        """Return metrics other than means over samples: torchmetrics objects by name, or a MetricCollection.

        Each evaluation takes copies of them, which see the outputs and targets of all ranks.
        """
        return {}

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, ParallelStyle]:
        """Return the plan by which torch's `parallelize_module` splits the model over ranks; empty if there is none.

        Args:
            model: as `model` returns it, perhaps without memory.
            ranks: the number of ranks that share it, `island.tensor` of a run.

        Returns:
            Styles by the names of modules, which may be patterns: `{"layers.*.up": ColwiseParallel()}`.

        Raises:
            ValueError: the model does not divide among so many ranks; says what does.
        """
        return {}
