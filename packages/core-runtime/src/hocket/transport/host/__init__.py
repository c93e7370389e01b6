"""The host path: ranks of one host work on each other's memory instead of sending messages."""

from hocket.transport.host.collectives import HostCollectives
from hocket.transport.host.exchange import HostExchange
from hocket.transport.host.memory import SMALLEST_BYTES
from hocket.transport.host.peer import HostPeer
from hocket.transport.host.request import Operation, ProcessLane
from hocket.transport.host.status import Failures, HostStatus, StatusBoard

__all__ = [
    "SMALLEST_BYTES",
    "Failures",
    "HostCollectives",
    "HostExchange",
    "HostPeer",
    "HostStatus",
    "Operation",
    "ProcessLane",
    "StatusBoard",
]
