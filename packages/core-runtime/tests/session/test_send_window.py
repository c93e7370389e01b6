"""Segments that begin in their turn: few at a time, in order, and none waits for ever."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from toys import batches, on_ranks
from turns_cases import begin

import hocket
from hocket.api import Segment
from hocket.testing.session import inner_of
from hocket.transport.peer import Peer
from hocket.transport.wrapper import WrapperPeer

RANKS = 3


class BetweenHosts(WrapperPeer):
    """Whose ranks share a network, and whose waits advance nothing: the simulation's."""

    def __init__(self, held: Peer) -> None:
        super().__init__(held)
        self.shares_network = True


def test_few_are_under_way_and_the_first_come_first() -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        # Three small segments, then three that are almost a megabyte each.
        widths = [5, 40, 3, 300, 400, 300, 400, 3]
        layers = [torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exchange = {"collective": "gossip", "topology": "ring", "segments": "layers", "overlap": "forward"}
        with hocket.attach(
            model, optimizer, {"parameters": [exchange]}, peer=BetweenHosts(hocket.join())
        ) as session:
            (opened,) = inner_of(session).phase.opened
            begun: list[int] = []
            start = opened.start

            def noted(segment: Segment) -> None:
                begun.append(segment.index)
                start(segment)

            opened.start = noted  # type: ignore[method-assign]
            called_alone = False
            for x, y in session.data(batches(rank, 2)):
                F.cross_entropy(model(x), y).backward()
                begun.clear()
                optimizer.step()
                if called_alone:  # parts that are called alone may be any: all is sent when the step ends
                    assert begun == list(range(7))
                    continue
                assert begun == []
                begin(session)
                # Up to 64 KB, and the one that passes it.
                assert begun == [0, 1, 2, 3]
                model[2](torch.zeros(1, 3).double())  # a part of the model alone: all is merged
                assert begun == list(range(7))
                called_alone = True

    on_ranks(RANKS, run)
