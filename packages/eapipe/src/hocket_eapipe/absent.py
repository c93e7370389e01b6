"""The stages of a pipeline that this rank does not train: given up between the moments at which the model is whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hocket.session.attaching import broadcast_model
from hocket.transport.peer import Lane
from hocket_eapipe.mesh import Mesh

__all__ = ["AbsentStages"]


class AbsentStages:
    """Takes the memory of other ranks' parameters away at once, and gives it back for a while.

    Args:
        modules: all stages.
        mesh: who holds which.
        place: this rank's, in its pipeline.
        lane: over the pipeline.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: Mesh, place: int, lane: Lane) -> None:
        self._modules = modules
        self._mesh = mesh
        self._lane = lane
        absent = [
            p for s, module in enumerate(modules) if mesh.holders[s] != place for p in module.parameters()
        ]
        self._parameters = [(parameter, parameter.shape, parameter.stride()) for parameter in absent]
        self._whole = True
        self.release()

    @torch.no_grad()
    def fetch(self) -> None:
        """Let each stage's parameters and buffers be those of the rank that holds it; collective in the pipeline."""
        if not self._whole:
            for parameter, shape, stride in self._parameters:
                parameter.data = parameter.data.new_empty_strided(shape, stride)
        self._whole = True
        for module, holder in zip(self._modules, self._mesh.holders, strict=True):
            broadcast_model(module, self._lane, holder)

    def release(self) -> None:
        """Give up the parameters of the stages that other ranks hold."""
        if self._whole:
            for parameter, _, _ in self._parameters:
                parameter.data = parameter.data.new_empty(0)
        self._whole = False
