"""The contract of collectives, where all ranks have to come: then a partial allreduce is an allreduce."""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.testing.collective import CollectiveConformance
from hocket_eager import Algorithm, Delivery, PartialAllreduce, Quorum


class _Full(CollectiveConformance):
    slot = "gradients"

    def expected(self, values: Array, round: int, segment: int) -> Array:
        return np.broadcast_to(values.mean(axis=0), values.shape)


class TestLastOfAll(_Full):
    collective = PartialAllreduce(candidates=None, starts=Quorum.LAST)


# Sums in other orders: of few ranks they show, and a ring of many takes long.
class TestLastOfAllInARing(_Full):
    sizes = (1, 2, 3, 5)
    collective = PartialAllreduce(
        candidates=None, starts=Quorum.LAST, missed=Delivery.SUM, algorithm=Algorithm.RING
    )


class TestSoloThatNobodyMayBeLateFor(_Full):
    sizes = (1, 2, 3, 6)
    collective = PartialAllreduce(candidates=None, staleness=0, algorithm=Algorithm.STAR)
