"""What is trained: a task is data, a model, a loss and metrics; core's own tasks and the user's."""

from hocket.task.api import Task, TaskData
from hocket.task.bible import Bible
from hocket.task.buckets import BucketSampler
from hocket.task.classification import Classification
from hocket.task.digits import Digits
from hocket.task.fashion_mnist import FashionMNIST
from hocket.task.hyperplane import Hyperplane
from hocket.task.loading import Loader, loader
from hocket.task.samples import BatchedSamples, Scaling, TensorSamples
from hocket.task.sequences import ClassifiedSequences, NextElements, Sequences
from hocket.task.shard import ShardSampler
from hocket.task.user import load_user_task
from hocket.task.videos import Videos

__all__ = [
    "Task",
    "TaskData",
    "Bible",
    "Classification",
    "Digits",
    "FashionMNIST",
    "Hyperplane",
    "Videos",
    "BatchedSamples",
    "Scaling",
    "TensorSamples",
    "ClassifiedSequences",
    "NextElements",
    "Sequences",
    "BucketSampler",
    "Loader",
    "ShardSampler",
    "loader",
    "load_user_task",
]
