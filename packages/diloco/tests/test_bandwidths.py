"""The bandwidths that the papers' simulations ask for, from the plan of a strategy.

Both papers overlap whatever is sent with backward, two thirds of a step, which sessions do for gradients only. Values
travel in 16 bits, and once: here to the other of two ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.plan.plan import Plan, plan
from hocket.plan.utilisation import least_bandwidths
from hocket.transport.network import NetworkModel

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
BF16 = {"collective": "sparse_allreduce", "compressor": "bf16", "segments": "layers"}
OUTER = {"outer": {"name": "sgd", "lr": 0.7, "momentum": 0.9}}
# Of the paper's 24 layers a fragment has three, and embeddings are one more.
FRAGMENTS = {"every": 100, "stagger": True, "segments": {"name": "fragments", "count": 9}}
FOUR_BITS = {"compressor": {"name": "diloco.quantise", "format": "e3m0"}}

# arXiv:2501.18512, table 4, in Gbit/s: 1B parameters, steps of 0.1 s. The last of the first row, 569, is left out:
# where backward hides gradients, 99 % take little more than 95 %.
STREAMING: dict[str, tuple[dict[str, Any], list[float]]] = {
    "data parallel": ({"gradients": [BF16]}, [86.8, 152.6, 184.2, 222.3]),
    "diloco": ({"parameters": [{**BF16, "every": 100, **OUTER}]}, [1.4, 6.2, 13.3, 23.3, 86.8]),
    "streaming": ({"parameters": [{**BF16, **FRAGMENTS, **OUTER}]}, [1.4, 5.2, 9.1, 16.0, 28.1]),
    "overlapped": (
        {"parameters": [{**BF16, **FRAGMENTS, **OUTER, "delay": 1}]},
        [1.4, 4.3, 6.2, 9.1, 11.0],
    ),
    "4 bits": (
        {"parameters": [{**BF16, **FRAGMENTS, **OUTER, "delay": 1, **FOUR_BITS}]},
        [0.4, 0.9, 1.7, 2.0, 3.0],
    ),
}

# arXiv:2503.09799, table 6: 10B parameters, steps of 0.8 s, by H.
SCALING = {
    10: [16, 49.4, 86.8, 152.6, 222.3],
    50: [3, 11, 23.3, 41, 126.5],
    100: [1.4, 6.2, 13.3, 23.3, 86.8],
    300: [0.5, 2, 4.3, 9.1, 41],
}


def needed(strategy: dict[str, Any], numel: float, step_s: float) -> list[float]:
    """Return the least bandwidths, in Gbit/s."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(round(numel / 27 / 1000), 1000, bias=False) for _ in range(27)))
    composed = hocket.compose(strategy)

    def planned(bandwidth: float) -> Plan:
        return plan(composed, model, 2, NetworkModel(0.0, bandwidth))

    found = partial(least_bandwidths, planned, step_s, hidden_s=2 / 3 * step_s)(SHARES)
    return [each / 1e9 for each in found if each is not None]


@pytest.mark.parametrize("row", STREAMING)
def test_streaming_diloco_table_4(row: str) -> None:
    strategy, asked = STREAMING[row]
    found = needed(strategy, 1e9, 0.1)[: len(asked)]
    # A step of the grid is a factor of 1.21, and what is published is rounded to two digits.
    assert np.abs(np.log(np.divide(found, asked))).max() < np.log(1.31), found


@pytest.mark.parametrize("every", SCALING)
def test_scaling_laws_table_6(every: int) -> None:
    """Two steps of the grid above it throughout, as if 0.7 of the parameters travelled; with so many it is met."""
    strategy = {"parameters": [{**BF16, "every": every, **OUTER}]}
    ratio = np.divide(needed(strategy, 10e9, 0.8), SCALING[every])
    assert ratio.min() > 0.99
    assert ratio.max() < 1.8, ratio
    fitted = np.divide(needed(strategy, 6.75e9, 0.8), SCALING[every])
    assert np.abs(np.log(fitted)).max() < np.log(1.31), fitted
