"""Classification: the base of tasks with classes, and of tasks of images for Hocket's networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hocket.task.api import Task
from hocket.task.models import build, check_name


@dataclass(frozen=True)
class Classification(Task):
    """A task whose targets are classes, int64 [batch], and whose model gives logits, [batch, num_classes].

    Attributes:
        label_smoothing: probability mass spread evenly over all classes, in [0, 1); in the loss alone.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; allowed: 0 or more, below 1")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=1) == target).sum()}


@dataclass(frozen=True)
class ImageClassification(Classification):
    """Classification of images by one of Hocket's networks.

    Attributes:
        network: the network to train, one of `hocket.task.models.NAMES`.
        hidden: units of the hidden layer of the network "mlp"; the others have their own sizes.
    """

    network: str = "mlp"
    hidden: int = 128

    #: Channels, height and width of an input.
    input_shape: ClassVar[tuple[int, int, int]]
    num_classes: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.network)
        if self.hidden < 1:
            raise ValueError(f"hidden is {self.hidden}; allowed: 1 or more")

    def model(self) -> nn.Module:
        return build(self.network, self.input_shape, self.num_classes, hidden=(self.hidden,))
