"""The network between an exchange's ranks: memory within a host, and the link that its ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hocket.strategy.exchange import Exchange
from hocket.strategy.scope import Placement
from hocket.topology.api import Topology
from hocket.transport.network import NetworkModel

#: What joins ranks of one host, through its memory: near what `tools/bench -k messages` measures over MPI.
WITHIN_A_HOST = NetworkModel(latency_s=15e-6, bandwidth_bits_per_s=60e9)
_ROUNDS_LOOKED_AT = 16
_HOSTS_LOOKED_AT = 4

Part = tuple[int, ...]


def networks(
    exchange: Exchange, parts: Sequence[Part], placement: Placement, network: NetworkModel
) -> list[NetworkModel]:
    """Return the network between the ranks of each part of an exchange.

    Ranks of one host use its memory, if there are several hosts; with a single one they use `network`. Those of several
    hosts use the hosts' links, each of which carries the messages of all parts that have ranks on its host, and in
    gossip those of each rank. Collectives pass a host's link once, as a ring does.

    Args:
        exchange: the strategy's exchange.
        parts: the sets of ranks that exchange at once.
        placement: of all ranks.
        network: between two hosts; its bandwidth is that of each host's link.
    """
    if len(set(placement.hosts)) == 1:
        return [network] * len(parts)
    hosts = [{placement.hosts[rank] for rank in part} for part in parts]
    parts_on = Counter(host for those in hosts if len(those) > 1 for host in those)
    found = []
    for part, those in zip(parts, hosts, strict=True):
        messages = float(max(parts_on[host] for host in those))
        if len(those) > 1 and exchange.topology is not None and len(part) > len(those):
            messages *= _messages_on_a_link(exchange.topology, part, placement)
        found.append(_shared(network, messages))
    return found


def _shared(network: NetworkModel, messages: float) -> NetworkModel:
    """Return a link shared by `messages` messages at a time; for none, the memory within a host."""
    within, fastest = WITHIN_A_HOST, max(WITHIN_A_HOST.bandwidth_bits_per_s, network.bandwidth_bits_per_s)
    if messages == 0:
        return replace(
            network, latency_s=min(within.latency_s, network.latency_s), bandwidth_bits_per_s=fastest
        )
    return replace(network, bandwidth_bits_per_s=min(network.bandwidth_bits_per_s / messages, fastest))


@lru_cache(maxsize=256)
def _messages_on_a_link(topology: Topology, part: Part, placement: Placement) -> float:
    """Return the mean number of messages that leave the busiest host for one message of each rank."""
    on_host: dict[int, list[int]] = {}
    for place, rank in enumerate(part):
        on_host.setdefault(placement.hosts[rank], []).append(place)
    members = list(on_host.values())[:_HOSTS_LOOKED_AT]
    left = sent = 0.0
    for round in range(_ROUNDS_LOOKED_AT):
        leaving = []
        for places in members:
            host = placement.hosts[part[places[0]]]
            to = [
                placement.hosts[part[other]]
                for place in places
                for other in topology.neighbours(place, len(part), round, 0).send_to
            ]
            leaving.append(sum(other != host for other in to))
            sent += len(to) / len(places) / len(members)
        left += max(leaving)
    return left / sent if sent else 0.0
