"""Links between hosts: who shares one, against messages counted one by one."""

from __future__ import annotations

import pytest
from torch import nn

import hocket
from hocket.plan.links import WITHIN_A_HOST, networks
from hocket.plan.plan import plan
from hocket.strategy.exchange import Exchange
from hocket.strategy.scope import Placement
from hocket.transport.network import NetworkModel

SLOW = NetworkModel(latency_s=1e-3, bandwidth_bits_per_s=1e9)
MODEL = nn.Linear(1000, 1000)


def exchange_of(recipe: str, slot: str = "parameters", *overrides: str) -> Exchange:
    found: Exchange = getattr(hocket.compose(recipe, *overrides), slot)[0]
    return found


def between(exchange: Exchange, placement: Placement) -> list[NetworkModel]:
    return networks(exchange, exchange.over.parts(placement), placement, SLOW)


@pytest.mark.parametrize("placement", [Placement((0, 0, 0, 0)), Placement((0, 1, 2, 3))])
@pytest.mark.parametrize("recipe", ["periodic_average", "dpsgd", "sgp"])
def test_ranks_of_one_host_alone_and_hosts_of_one_rank_have_the_network_as_it_is(
    recipe: str, placement: Placement
) -> None:
    assert between(exchange_of(recipe), placement) == [SLOW]


def test_groups_within_hosts_have_memory_and_their_leaders_the_network() -> None:
    strategy = hocket.compose("hierarchical_sgd")
    placement = Placement.of_counts([4, 4])
    links = {each.name: set(between(each, placement)) for each in strategy.gradients}
    assert WITHIN_A_HOST in next(iter(links.values()))
    assert {SLOW} in links.values()


def test_leaders_of_each_share_of_the_segments_share_their_host_s_link() -> None:
    leaders = hocket.compose(
        "hierarchical_sgd", *(f"gradients.{i}.over.sharded=true" for i in (0, 1))
    ).gradients[1]
    found = between(leaders, Placement.of_counts([4, 4, 4]))
    assert [each.bandwidth_bits_per_s for each in found] == [SLOW.bandwidth_bits_per_s / 4] * 4


@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("counts", [[4, 4], [8, 8, 8, 8], [1, 3, 2]])
def test_gossip_shares_a_link_among_the_messages_that_leave_a_host(graph: str, counts: list[int]) -> None:
    exchange = exchange_of("dpsgd", "parameters", f"parameters.0.topology={graph}")
    topology = exchange.topology
    assert topology is not None
    placement = Placement.of_counts(counts)
    size, hosts = placement.size, placement.hosts
    busiest = sent = 0
    for round in range(16):
        messages = [
            (hosts[rank], hosts[to])
            for rank in range(size)
            for to in topology.neighbours(rank, size, round, 0).send_to
        ]
        sent += len(messages)
        leaving = [source for source, to in messages if source != to]
        busiest += max(leaving.count(host) for host in set(hosts))
    (link,) = between(exchange, placement)
    expected = SLOW.bandwidth_bits_per_s * (sent / size) / busiest
    if len(set(counts)) == 1:
        assert link.bandwidth_bits_per_s == pytest.approx(expected)
    else:  # a rank's mean number of messages is taken by host
        assert link.bandwidth_bits_per_s == pytest.approx(expected, rel=0.35)
    assert link.latency_s == SLOW.latency_s


def test_ranks_that_meet_within_their_host_alone_take_memory_s_time() -> None:
    pairs = hocket.compose("dpsgd", "parameters.0.over={name: group, size: 2}").parameters[0]
    assert between(pairs, Placement.of_counts([4, 4])) == [WITHIN_A_HOST] * 4


def test_hierarchical_sgd_sends_between_hosts_what_as_many_hosts_of_one_rank_do() -> None:
    def seconds(recipe: str, counts: list[int]) -> float:
        return plan(hocket.compose(recipe), MODEL, Placement.of_counts(counts), SLOW).seconds_per_step

    alone, together = seconds("sgd", [1] * 4), seconds("hierarchical_sgd", [8] * 4)
    assert alone < together < 1.3 * alone
    assert seconds("sgd", [8] * 4) > 2 * alone  # 62 latencies of a ring of 32, in place of 6


def test_a_faster_network_than_memory_stays_as_fast() -> None:
    fast = NetworkModel(latency_s=1e-6, bandwidth_bits_per_s=400e9)
    group = exchange_of("hierarchical_sgd", "gradients")
    assert set(networks(group, ((0, 1), (2, 3)), Placement.of_counts([2, 2]), fast)) == {fast}
