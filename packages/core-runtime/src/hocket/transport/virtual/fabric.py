"""The links of the virtual network: the times at which messages leave and arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.transport.network import NetworkModel
from hocket.transport.virtual.timeline import Timeline


class Fabric:
    """The links out of and into every rank, each carrying one message, or collective, at a time.

    Attributes:
        num_messages: number of messages carried; native collectives are not made of messages here.
        num_bytes: their bytes together.
    """

    def __init__(self, timeline: Timeline, network: NetworkModel, size: int) -> None:
        self.num_messages = 0
        self.num_bytes = 0
        self._timeline = timeline
        self._network = network
        self._out_free_at_s = [0.0] * size
        self._in_free_at_s = [0.0] * size

    def carry(
        self, source: int, to: int, nbytes: int, sent: Callable[[], None], delivered: Callable[[], None]
    ) -> None:
        """Send `nbytes` bytes from rank `source` to rank `to`, now.

        Messages between the same two ranks are delivered in the order of the calls. A message to oneself
        takes no time.

        Args:
            source: the sending rank of the world.
            to: the receiving rank of the world.
            nbytes: the message's size.
            sent: called when the message has left the sender's link.
            delivered: called when its last byte has arrived.
        """
        self.num_messages += 1
        self.num_bytes += nbytes
        timeline = self._timeline
        if source == to:
            sent()
            delivered()
            return
        occupied_s = self._network.link_seconds(nbytes)
        begin_s = max(timeline.now_s, self._out_free_at_s[source])
        self._out_free_at_s[source] = begin_s + occupied_s

        def reach_receiver() -> None:
            # Not before the first byte is there is it known which messages compete for the receiver's link.
            arrived_s = max(timeline.now_s, self._in_free_at_s[to]) + occupied_s
            self._in_free_at_s[to] = arrived_s
            timeline.call_at(arrived_s, delivered)

        timeline.call_at(begin_s + occupied_s, sent)
        timeline.call_at(begin_s + self._network.latency_s, reach_receiver)

    def carry_together(
        self, ranks: Sequence[int], occupied_s: float, latency_s: float, ended: Callable[[], None]
    ) -> None:
        """Carry a native collective's bytes on all links of its ranks as soon as all are free.

        Args:
            ranks: the ranks of the world that take part.
            occupied_s: time that their links are in use, in seconds.
            latency_s: time from then to its end, in seconds.
            ended: called at its end.
        """
        end_s = self._timeline.now_s
        if occupied_s:
            links = (self._out_free_at_s, self._in_free_at_s)
            end_s = occupied_s + max(end_s, *(each[rank] for each in links for rank in ranks))
            for each in links:
                for rank in ranks:
                    each[rank] = end_s
        self._timeline.call_at(end_s + latency_s, ended)
