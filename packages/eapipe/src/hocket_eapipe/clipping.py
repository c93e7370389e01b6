"""Clipping of gradients by the norm of a whole model, of which each rank of a pipeline holds some stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from hocket.api import Lane, ReplicaSession


@torch.no_grad()
def clip_by_whole_norm(sessions: Sequence[ReplicaSession], max_norm: float, lane: Lane) -> None:
    """Clip the gradients of all stages by the norm of the whole; collective in the pipeline.

    Where it is not finite, every stage leaves the step out, or refuses it: also one whose own gradients are finite.

    Args:
        sessions: of this rank's stages.
        max_norm: the largest that the norm may be.
        lane: of the pipeline's ranks.
    """
    parameters = [p for session in sessions for p in session.model.parameters()]
    own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    squares, total = np.array([float(own) ** 2]), np.zeros(1)
    lane.iallreduce(squares, total).wait()
    norm = torch.tensor(math.sqrt(total[0]), dtype=own.dtype, device=own.device)
    if not norm.isfinite():
        for session in sessions:
            if session.phase.gradients is not None:
                session.phase.gradients.nonfinite_anywhere = True
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
