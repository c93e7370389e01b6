"""How a batch flows through the model: engines."""

from hocket.engine.api import Attachment, Engine, Loss, MakeOptimizer, PlannedStage, Stepper, StepResult

__all__ = ["Attachment", "Engine", "Loss", "MakeOptimizer", "PlannedStage", "StepResult", "Stepper"]
