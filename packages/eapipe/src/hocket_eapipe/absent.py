"""The stages of a pipeline that this rank does not train: given up between the moments at which the model is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hocket.api import CheckpointError, Lane, broadcast_model
from hocket_eapipe.mesh import Mesh

__all__ = ["AbsentStages"]


class AbsentStages:
    """Takes the memory of other ranks' parameters away at once, and gives it back for a while.

    While it is away, `state_dict()` and pickling of what has such parameters are refused: they would be saved empty.

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
        elsewhere = [(s, module) for s, module in enumerate(modules) if mesh.holders[s] != place]
        absent = [p for _, module in elsewhere for p in module.parameters()]
        owners = [
            (s, m)
            for s, module in elsewhere
            for m in module.modules()
            if next(m.parameters(recurse=False), None) is not None
        ]
        self._handles = [
            owner.register_state_dict_pre_hook(_Refusal(self._refuse, stage)) for stage, owner in owners
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

    def close(self) -> None:
        """Let the model be whole for good; collective in the pipeline."""
        self.fetch()
        for handle in self._handles:
            handle.remove()

    def _refuse(self, stage: int) -> None:
        if not self._whole:
            holder = self._mesh.holders[stage]
            raise CheckpointError(
                f"stage {stage + 1} of {self._mesh.stages} is on rank {holder} of its pipeline and empty here, so that "
                "saving the model would lose it: save within session.consensus() or session.replica(), which make the "
                "model whole, and after an error continue from what session.save() has written"
            )

    def release(self) -> None:
        """Give up the parameters of the stages that other ranks hold."""
        if self._whole:
            for parameter, _, _ in self._parameters:
                parameter.data = parameter.data.new_empty(0)
        self._whole = False


class _Refusal:
    """A hook of a module with parameters that may be away; whoever pickles or copies the module asks it, too."""

    def __init__(self, refuse: Callable[[int], None], stage: int) -> None:
        self._refuse = refuse
        self._stage = stage

    def __call__(self, *_: object) -> None:
        self._refuse(self._stage)

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse(self._stage)
        return _Refusal, (_nothing, self._stage)


def _nothing(stage: int) -> None:
    """Refuse nothing: a copy of a whole model stays whole."""
