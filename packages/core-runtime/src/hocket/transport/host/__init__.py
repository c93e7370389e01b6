"""The host path: ranks of one host read each other's memory instead of sending messages."""

from hocket.transport.host.allreduce import (
    MARK_BYTES,
    SMALLEST_BYTES,
    HostAllreduce,
    HostLane,
    HostProgress,
    share_bytes,
)
from hocket.transport.host.memory import HostMemory, shared_views

__all__ = [
    "MARK_BYTES",
    "SMALLEST_BYTES",
    "HostAllreduce",
    "HostLane",
    "HostMemory",
    "HostProgress",
    "share_bytes",
    "shared_views",
]
