"""Weighted sums of what ranks of a host give, of which each works out a share and writes it where it belongs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from hocket.arrays import MixingRows
from hocket.transport.host.exchange import HostExchange, HostLane
from hocket.transport.host.memory import Shared

if TYPE_CHECKING:
    from hocket.kernels.mixing import JoinedRows

__all__ = ["HostMixer"]


class HostMixer:
    """Weighted sums over and over of the same places.

    Args:
        lane: its exchanges.
        places: of each what everybody gives, [n] floats of one dtype, and where everybody's sum goes, its own of these
            or other memory.
    """

    def __init__(self, lane: HostLane, places: Sequence[tuple[Shared, Shared]]) -> None:
        from hocket.kernels import Mix

        self._lane = lane
        arrays = [values.views[lane.rank] for values, _ in places]
        self._mix = Mix(
            lane.rank,
            [values.addresses for values, _ in places],
            [outs.addresses for _, outs in places],
            [array.size for array in arrays],
            arrays[0].dtype,
        )
        self._places = places  # whose memory lives as long as this
        self._what = "; ".join(f"{values.what} into {outs.what}" for values, outs in places)

    def start(self, rows: Sequence[MixingRows]) -> HostExchange:
        """Put the sums where they go; see `Mixer.start`."""
        joined = self._mix.join(rows)
        connected = self._mix.connected(joined)
        graphs = 0
        for numbers in joined:
            graphs = zlib.crc32(numbers.data, graphs)
        return self._lane.start(
            f"mix of {self._what} over graphs {graphs:08x}",
            partial(self._write, joined),
            touched=connected,
            touching=connected,
        )

    def _write(self, joined: JoinedRows) -> list[int]:
        # By way of `self`, which keeps the memory: the exchange is carried out also where its caller has dropped it.
        return self._mix(joined)
