"""Collectives as data: schedules of sends, receives, computations and no-ops that a progress engine executes.

Source: Li et al., eager-SGD, sec. 4.1.1.
"""

from hocket.schedule.activation import activation_broadcast
from hocket.schedule.allreduce import recursive_doubling_allreduce, ring_allreduce, tree_allreduce
from hocket.schedule.broadcast import binomial_broadcast
from hocket.schedule.mutex import Mutex
from hocket.schedule.operation import Add, Compute, Copy, Gate, Logic, NoOp, Operation, Receive, Send
from hocket.schedule.rendering import render
from hocket.schedule.schedule import Schedule, ScheduleError, chain

__all__ = [
    "Schedule",
    "ScheduleError",
    "Operation",
    "Logic",
    "NoOp",
    "Add",
    "Compute",
    "Copy",
    "Gate",
    "Send",
    "Receive",
    "Mutex",
    "chain",
    "render",
    "activation_broadcast",
    "recursive_doubling_allreduce",
    "ring_allreduce",
    "tree_allreduce",
    "binomial_broadcast",
]
