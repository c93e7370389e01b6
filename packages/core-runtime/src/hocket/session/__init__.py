"""A strategy attached to a model and an optimizer: the moments of a training step."""

from hocket.session.attaching import attach
from hocket.session.base import TrainingSession
from hocket.session.session import Session

__all__ = ["Session", "TrainingSession", "attach"]
