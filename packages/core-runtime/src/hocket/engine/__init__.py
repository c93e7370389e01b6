"""How a batch flows through the model: engines."""

from hocket.engine.api import Engine, Stepper, StepResult

__all__ = ["Engine", "StepResult", "Stepper"]
