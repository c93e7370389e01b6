"""The `torch` transport: messages over its own TCP sockets between ranks that share a TCPStore of torch.distributed.

Between ranks of one host they go through pipes in shared memory.

Each rank has one connection to each other. A message is matched by (lane, source, round); collectives are schedules of
messages (`hocket.schedule`), and between ranks of one host work on shared memory, as on every transport of processes.
A closed connection shows that its rank has died. Gloo is not used: its messages can neither be polled nor withdrawn.

Messages are neither encrypted nor signed, and any process that reaches the store's port can read and write there: the
network has to be trusted. A connection begins with a proof that its rank has read the job's token in the store; others'
are closed. Messages contain bytes, numbers and JSON, which run no code.

torch is imported when `join` is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.transport.tcp.peer import TcpPeer, join

__all__ = ["TcpPeer", "join"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("hocket.transport.tcp.peer"), name)
