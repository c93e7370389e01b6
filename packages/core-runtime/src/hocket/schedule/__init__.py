"""Collectives as data: schedules of sends, receives, computations and no-ops.

Source: Li et al., eager-SGD, sec. 4.1.1.
"""

from hocket.schedule.builders import (
    activation_broadcast,
    allgather,
    alltoall,
    binomial_allreduce,
    binomial_broadcast,
    binomial_reduce,
    rabenseifner_allreduce,
    recursive_doubling_allreduce,
    ring_allreduce,
    tree_allreduce,
)
from hocket.schedule.operations import Add, Compute, Gate, Logic, NoOp, Operation, Receive, Send
from hocket.schedule.schedule import Schedule, ScheduleError, chain

__all__ = [
    "Schedule",
    "ScheduleError",
    "Operation",
    "Logic",
    "NoOp",
    "Add",
    "Compute",
    "Gate",
    "Send",
    "Receive",
    "chain",
    "activation_broadcast",
    "allgather",
    "alltoall",
    "rabenseifner_allreduce",
    "recursive_doubling_allreduce",
    "ring_allreduce",
    "tree_allreduce",
    "binomial_allreduce",
    "binomial_broadcast",
    "binomial_reduce",
]
