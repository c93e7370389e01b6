"""The stages of a pipeline that other ranks train: their memory is freed except while the model is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hocket.api import Lane, broadcast_model
from hocket.errors import CheckpointError
from hocket_eapipe.mesh import Mesh


class AbsentStages:
    """The stages that other ranks train; their parameters' memory is freed at once, and returned for a while.

    While it is freed, `state_dict()` and pickling of modules with such parameters are refused: they would be saved
    empty.

    Args:
        modules: all stages.
        mesh: the holders of the stages.
        place: this rank's place in its pipeline.
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
            owner.register_state_dict_pre_hook(_RefusingHook(self._refuse, stage)) for stage, owner in owners
        ]
        self._parameters = [(parameter, parameter.shape, parameter.stride()) for parameter in absent]
        self._whole = True
        self.release()

    @torch.no_grad()
    def fetch(self) -> None:
        """Set each stage's parameters and buffers to those of its holder; collective in the pipeline."""
        if not self._whole:
            for parameter, shape, stride in self._parameters:
                parameter.data = parameter.data.new_empty_strided(shape, stride)
        self._whole = True
        for module, holder in zip(self._modules, self._mesh.holders, strict=True):
            broadcast_model(module, self._lane, holder)

    def close(self) -> None:
        """Make the model whole for good; collective in the pipeline."""
        self.fetch()
        for handle in self._handles:
            handle.remove()

    def _refuse(self, stage: int) -> None:
        if not self._whole:
            holder = self._mesh.holders[stage]
            raise CheckpointError(
                f"stage {stage + 1} of {self._mesh.stages} is on rank {holder} of its pipeline and empty here, so a "
                "saved model would lack it. Save within session.consensus() or session.replica(), which assemble "
                "the whole model; after an error continue from the files of session.save()"
            )

    def release(self) -> None:
        """Free the parameters of the stages that other ranks hold."""
        if self._whole:
            for parameter, _, _ in self._parameters:
                parameter.data = parameter.data.new_empty(0)
        self._whole = False


class _RefusingHook:
    """A hook of a module whose parameters may be freed; pickling and copying the module call it, too."""

    def __init__(self, refuse: Callable[[int], None], stage: int) -> None:
        self._refuse = refuse
        self._stage = stage

    def __call__(self, *_: object) -> None:
        self._refuse(self._stage)

    def __reduce__(self) -> tuple[object, ...]:
        self._refuse(self._stage)
        return _RefusingHook, (_nothing, self._stage)


def _nothing(stage: int) -> None:
    """Refuse nothing: a copy of a whole model stays whole."""
