"""Buffers that ranks average with the parameters: statistics that a model gathers, as BatchNorm does."""

from __future__ import annotations

import zlib
from collections import defaultdict
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hocket.arrays import Array
from hocket.collective.allreduce import Allreduce
from hocket.segment.shape import wire_dtype
from hocket.session.exchange.active import ActiveExchange
from hocket.session.exchange.checksums import checksum
from hocket.session.save.untrained import UntrainedTensors
from hocket.transport.network import NetworkModel


class BufferMean:
    """The averaging of a model's statistics over an exchange's ranks; construction and closing are collective.

    Args:
        opened: the exchange whose ranks average and whose counters count it.
        untrained: knows the model's buffers and their weights.
    """

    def __init__(self, opened: ActiveExchange, untrained: UntrainedTensors) -> None:
        self._opened, self._untrained = opened, untrained
        self._lane = opened.peer.lane(f"{opened.exchange.name} buffers")
        self._names = list(untrained.statistics())
        self._of_all = opened.peer.size == untrained.num_ranks

    @torch.no_grad()
    def average(self) -> None:
        """Set statistics that differ to their mean by samples; collective."""
        there = self._untrained.statistics()
        of_ranks = self._look(there)
        samples, shapes, contents = of_ranks[:, 0], of_ranks[:, 1::2], of_ranks[:, 2::2]
        share = samples[self._lane.rank] * len(samples) / samples.sum() if samples.sum() else 1.0
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        unlike = []
        for number, name in enumerate(self._names):
            if (shapes[:, number] != shapes[0, number]).any():
                unlike.append(name)
            elif (contents[:, number] != contents[0, number]).any():
                alike[wire_dtype(there[name].dtype)].append(there[name])
        self._untrained.warn_unlike(unlike)
        for dtype, buffers in alike.items():
            own = torch.cat([buffer.reshape(-1).to("cpu", dtype) for buffer in buffers])
            if share != 1.0:
                own.mul_(share)
            total = torch.empty_like(own)
            send, receive = own.numpy(), total.numpy()
            self._opened.wait_for(partial(self._lane.iallreduce, send, receive), "buffers", send.nbytes)
            pieces = total.div_(self._lane.size).split([buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))
            # Bytes do not depend on the network.
            cost = Allreduce().cost(send.nbytes, self._lane.size, None, NetworkModel())
            self._opened.counters.bytes_sent += cost.bytes
        if self._of_all:
            self._untrained.note_equal()

    def _look(self, there: dict[str, Tensor]) -> Array:
        """Return of each rank, [size, 1 + 2 buffers], its samples, then two checksums of each buffer."""
        mine = [self._untrained.weights.total]
        for name in self._names:
            mine += (zlib.crc32(str(tuple(there[name].shape)).encode()), checksum(there[name]))
        send = np.array(mine, np.float64).view(np.uint8)
        receive = np.empty((self._lane.size, send.size), np.uint8)
        gather = partial(self._lane.iallgather, send, receive)
        messages = self._opened.wait_for(gather, "statistics", send.nbytes)
        return np.stack([message.copy().view(np.float64) for message in messages])

    def close(self) -> None:
        """Close the lane; collective."""
        self._lane.close()
