"""Models to plan for, built without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from hocket.quantities import count, read

if TYPE_CHECKING:
    from torch import nn

#: The number of equal matrices assumed for a model of which only the number of parameters is known.
MATRICES = 24

#: Of these numbers one divides the matrices' sides, as of real models: compressors cut tiles by divisors up to 64.
_DIVISORS = range(48, 65)


def model_of(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without memory, or with it, if the model reads values while it is built."""
    import torch

    with contextlib.suppress(Exception), torch.device("meta"):
        return build()
    # If the model itself is at fault, this fails in the user's own words.
    return build()


def model_of_size(params: str) -> nn.Module:
    """Build a model without memory of about as many parameters as a text such as 25M says.

    Raises:
        UserError: the text is no such number.
    """
    import torch
    from torch import nn

    width = max(1, round((read("--params", count, params) / MATRICES) ** 0.5))
    near = (each for off in range(width) for each in (width + off, width - off))
    if width > _DIVISORS[0]:
        width = next(each for each in near if any(each % divisor == 0 for divisor in _DIVISORS))
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(MATRICES)))
