"""The variables by which libraries on torch.distributed find a job's ranks, and those of a process group of its own."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

from hocket.errors import UserError
from hocket.transport.launchers import Launched
from hocket.transport.peer import Peer, gather


def missing_variables(found: Launched, peer: Peer, environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of torchrun's variables that this process lacks; collective.

    Args:
        found: the launcher's facts about this process.
        peer: all ranks.
        environment: as `os.environ`.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    places = gather(peer, [peer.memory.host_name, port])
    hosts = [host for host, _ in places]
    own, there = hosts[peer.rank], found.rendezvous
    if there is None:
        meeting = ("127.0.0.1" if len(set(hosts)) == 1 else hosts[0], places[0][1])
    else:
        meeting = (there.host, there.port)
    values = {
        "RANK": peer.rank,
        "WORLD_SIZE": peer.size,
        "LOCAL_RANK": hosts[: peer.rank].count(own),
        "LOCAL_WORLD_SIZE": hosts.count(own),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": meeting[1],
    }
    return {name: str(value) for name, value in values.items() if name not in environment}


def group_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that describe torch's process group; none without one of several ranks.

    A script that starts its ranks itself, by torch.multiprocessing.spawn, gives ranks to `init_process_group` alone.

    Args:
        environment: as `os.environ`.

    Raises:
        UserError: nothing says where the group's ranks meet.
    """
    if "torch.distributed" not in sys.modules:  # a launcher itself begins without torch
        return {}
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return {}
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size < 2 or distributed.get_backend() == "fake":
        return {}
    found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return found
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):  # type: ignore[attr-defined]
        raise UserError(
            f"torch.distributed has a process group of {size} ranks, but neither its store nor the environment says "
            "where they meet: set MASTER_ADDR and MASTER_PORT, or start the ranks by torchrun or `hocket launch`"
        )
    return found | {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
