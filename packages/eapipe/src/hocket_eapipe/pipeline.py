"""The engine `eapipe.pipeline`; imports no torch until it is attached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket_eapipe.configuration import PipelineConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hocket.api import Attachment, EngineSession, Loss, PlannedStage, plain


@dataclass(frozen=True)
class Pipeline(PipelineConfig):
    """The engine that divides a model into stages, and the stages among the ranks."""

    def attach(self, given: Attachment) -> EngineSession:
        """Share the model out; each rank keeps the parameters of its own stages and gives up the others'.

        Raises:
            AttachError: the model cannot be cut, or the optimizer cannot be copied.
            CompositionError: the pipelines do not fit that many ranks, or the strategy is meaningless with them.
        """
        from hocket_eapipe.session import PipelineSession

        return PipelineSession(self, given)

    def plan_stages(
        self, model: nn.Module, optimizer: Optimizer, example: plain.Batch, loss: Loss, ranks: int
    ) -> tuple[PlannedStage, ...]:
        from hocket_eapipe.planning import plan_stages

        return plan_stages(self, self.mesh(ranks), model, optimizer, example, loss)
