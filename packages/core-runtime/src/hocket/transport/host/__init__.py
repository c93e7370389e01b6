"""The host path: ranks of one host work on each other's memory instead of sending messages."""

from hocket.transport.host.collectives import open_host_collectives
from hocket.transport.host.memory import SMALLEST_BYTES
from hocket.transport.host.operation import HostOperation
from hocket.transport.host.peer import HostPeer, ProcessLane
from hocket.transport.host.status import Failures, HostStatus, StatusBoard

__all__ = [
    "SMALLEST_BYTES",
    "Failures",
    "HostOperation",
    "HostPeer",
    "HostStatus",
    "ProcessLane",
    "StatusBoard",
    "open_host_collectives",
]
