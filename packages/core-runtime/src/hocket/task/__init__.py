"""What is trained: a task is data, a model, a loss and metrics; core's own tasks and the user's."""

from hocket.task.api import Task, TaskData
from hocket.task.classification import Classification
from hocket.task.digits import Digits
from hocket.task.fashion_mnist import FashionMNIST
from hocket.task.hyperplane import Hyperplane
from hocket.task.samples import BatchedSamples, Scaling, TensorSamples
from hocket.task.shard import ShardSampler, loader
from hocket.task.user import load_user_task

__all__ = [
    "Task",
    "TaskData",
    "Classification",
    "Digits",
    "FashionMNIST",
    "Hyperplane",
    "BatchedSamples",
    "Scaling",
    "TensorSamples",
    "ShardSampler",
    "loader",
    "load_user_task",
]
