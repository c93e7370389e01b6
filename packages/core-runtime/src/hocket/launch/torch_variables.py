"""The variables by which libraries on torch.distributed find a job's ranks, where the launcher sets others."""

from __future__ import annotations

import socket
from collections.abc import Mapping

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
