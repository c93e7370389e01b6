"""The host path: ranks of one host work on each other's memory instead of sending messages."""

from hocket.transport.host.collectives import SMALLEST_BYTES, HostCollectives
from hocket.transport.host.exchange import HostExchange, HostLane
from hocket.transport.host.marks import MARK_BYTES, Marks
from hocket.transport.host.memory import HostMemory, Shared, find_shared
from hocket.transport.host.mixing import HostMixer
from hocket.transport.host.progress import HostProgress

__all__ = [
    "MARK_BYTES",
    "SMALLEST_BYTES",
    "HostCollectives",
    "HostExchange",
    "HostLane",
    "HostMemory",
    "HostMixer",
    "HostProgress",
    "Marks",
    "Shared",
    "find_shared",
]
