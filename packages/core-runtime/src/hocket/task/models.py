"""The networks of core's own tasks: small enough for a CPU, different enough for their communication.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import allowed_words, suggest

#: The networks that `build` knows.
NAMES = ("mlp", "cnn", "resnet20")


def check_name(name: str) -> None:
    """Raise ValueError, listing `NAMES`, where `name` is none of them."""
    if name not in NAMES:
        raise ValueError(f"network is {name!r}{allowed_words(', '.join(NAMES), suggest(name, NAMES))}")


def build(name: str, shape: tuple[int, int, int], classes: int, hidden: Sequence[int] = (128,)) -> nn.Module:
    """Return a new network, initialised from torch's global generator.

    Args:
        name: one of `NAMES`.
        shape: (C, H, W) of an input.
        classes: K.
        hidden: units of each hidden layer of "mlp".

    Returns:
        A module from float32 [N, C, H, W] to logits, float32 [N, K].

    Raises:
        ValueError: the name is none of `NAMES`, or the images are not what the network takes.
    """
    check_name(name)
    channels, height, width = shape
    if name == "mlp":
        return MLP(math.prod(shape), hidden, classes)
    if name == "resnet20":
        return ResNet20(channels, classes)
    if height != width:
        raise ValueError(f"the network 'cnn' needs square images, not {height} x {width}")
    return SmallCNN(channels, height, classes)


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between them, on inputs [N, ...] flattened to [N, in_features]."""

    def __init__(self, in_features: int, hidden: Sequence[int], classes: int) -> None:
        """Build a layer per entry of `hidden` (its units) and one for the logits.

        Args:
            in_features: elements of one input.
            hidden: units of each hidden layer; none makes a linear classifier.
            classes: K.
        """
        features = [in_features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(features):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        super().__init__(*layers, nn.Linear(features[-1], classes))


class SmallCNN(nn.Sequential):
    """Two convolutions, each halving the image, and two fully connected layers.

    105 866 parameters for one channel of 28 x 28 pixels and ten classes; 95 % of them in one layer, so that
    it communicates unlike a network of even layers.
    """

    def __init__(self, in_channels: int, image_size: int, classes: int) -> None:
        """Build for images of [in_channels, image_size, image_size].

        Raises:
            ValueError: `image_size` is below 4 and would be halved to nothing.
        """
        if image_size < 4:
            raise ValueError(f"image_size is {image_size}; allowed: 4 or more")
        super().__init__(
            nn.Conv2d(in_channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


class ResNet20(nn.Sequential):
    """A first convolution, three stages of three blocks with 16, 32 and 64 channels, a mean over the image.

    0.27 M parameters for three channels and ten classes. Takes images of any size; the second and
    the third stage halve them (32 to 8 in the paper, 28 to 7, 8 to 2).

    Source: K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    section 4.2 (n = 3, shortcuts of option A); initialised as in section 4.2's [13], normal with variance 2 /
    fan-in.
    """

    def __init__(self, in_channels: int, classes: int) -> None:
        """Build for images of [in_channels, H, W]."""
        blocks = []
        channels = 16
        for stage_channels in (16, 32, 64):
            for _ in range(3):
                blocks.append(_Block(channels, stage_channels))
                channels = stage_channels
        super().__init__(
            _conv3x3(in_channels, 16, stride=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )


class _Block(nn.Module):
    """A residual block of two convolutions: [N, C, H, W] to the same, or to [N, 2 C, ⌈H/2⌉, ⌈W/2⌉]."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.stride = 1 if in_channels == out_channels else 2
        self.extra_channels = out_channels - in_channels
        self.residual = nn.Sequential(
            _conv3x3(in_channels, out_channels, self.stride),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            _conv3x3(out_channels, out_channels, stride=1),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Return `x`, or, if the block halves it, every second pixel, with zeros for the new channels."""
        if self.stride == 1:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv
