"""Training problems: a task is data, a model, a loss and metrics. Core has one; the others are in hocket-tasks."""

from hocket.task.api import Task, TaskData
from hocket.task.classification import Classification, ImageClassification
from hocket.task.digits import Digits
from hocket.task.loading import Loader, loader
from hocket.task.samples import BatchedSamples, Scaling, TensorSamples
from hocket.task.shard import ShardSampler
from hocket.task.user import load_user_task

__all__ = [
    "Task",
    "TaskData",
    "Classification",
    "ImageClassification",
    "Digits",
    "BatchedSamples",
    "Scaling",
    "TensorSamples",
    "Loader",
    "ShardSampler",
    "loader",
    "load_user_task",
]
