"""Private training by Opacus: gradients for each sample, clipped, with noise, in an optimizer that wraps another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer

from idioms.batches import SAMPLES, classified, mlp
from idioms.side import Side, Told

NEEDS = ("opacus",)

#: The noise is added to what is exchanged, as is what a compressor makes of momentum.
EDITS = True


def train(side: Side) -> Told:
    """Train with gradients that are private before they are sent, and of which one rank's has the noise of all."""
    model = GradSampleModule(mlp())
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator()
    optimizer = DPOptimizer(
        inner,
        noise_multiplier=0.5 if side.rank == 0 else 0.0,
        max_grad_norm=0.5,
        expected_batch_size=SAMPLES // side.size,
        generator=generator,
    )
    session = side.attach(model, inner)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        generator.manual_seed(step)
        optimizer.zero_grad()
        # What backward leaves is not private: the optimizer puts together what is to be sent.
        with session.accumulate():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {}
