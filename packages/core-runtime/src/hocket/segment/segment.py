"""A segment: what one exchange sends at a time, as one flat buffer, and what comes back, as another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.arrays import Array
from hocket.segment.partition import ParameterSpan
from hocket.segment.shape import SegmentShape
from hocket.segment.staging import Staging, TrailerStaging
from hocket.transport.peer import Peer

__all__ = ["Segment", "allocate", "view_of"]


class Segment(SegmentShape):
    """Flat buffers of one dtype and device for a run of parameters.

    What is sent and what comes back are different buffers: nobody reads a half-received value, and the native
    allreduce of MPI libraries is up to four times faster so.

    Attributes:
        name: the exchange and this segment's number in it, for instance `gradients.0[3]`.
        index: the segment's number in its exchange.
        spans: the parameters and their offsets.
        numel: elements of data, padding included.
        outgoing: what this rank contributes, [numel + trailer_numel]; must not change while an exchange runs.
        incoming: what the exchange gives, [numel + trailer_numel].
        trailer_numel: how many numbers travel behind the data through the same linear combination. For gradients:
            the rank's weight, its number of non-finite segments, and for each parameter whether it had a gradient.
        outgoing_array, incoming_array: the same for transports: the buffers' memory, their twins in pinned memory where
            they lie on a GPU and lanes do not, and the buffers themselves where lanes are on the GPU, too.
        finite: whether `outgoing` holds neither NaN nor Inf in this round; None where nobody has looked yet.
        flag: the index in `outgoing` of the one number of the trailer that the device writes, and that travels from
            there; None where the host writes them all.
    """

    def __init__(
        self,
        name: str,
        index: int,
        spans: Sequence[ParameterSpan],
        outgoing: Tensor,
        incoming: Tensor,
        *,
        on_lanes: bool = False,
    ) -> None:
        """Make a segment of buffers.

        Args:
            name, index, spans, outgoing, incoming: the attributes.
            on_lanes: whether lanes take buffers where these are, so that only trailers are copied to host memory.
        """
        self.name = name
        self.index = index
        self.spans = tuple(spans)
        self.outgoing = outgoing
        self.incoming = incoming
        self.trailer_numel = outgoing.numel() - self.numel
        self.finite: bool | None = None
        self.flag: int | None = None
        self._staging: Staging | None = None
        self._trailers: TrailerStaging | None = None
        if self.on_device and on_lanes:
            self._trailers = TrailerStaging(outgoing, incoming, self.numel)
            self.outgoing_array: Any = outgoing
            self.incoming_array: Any = incoming
            return
        if self.on_device:
            self._staging = Staging(outgoing, incoming)
        on_host = self._staging or self
        self.outgoing_array = on_host.outgoing.detach().numpy()
        self.incoming_array = on_host.incoming.detach().numpy()

    @property
    def outgoing_trailer(self) -> Array:
        """The trailer to send, as a NumPy view [trailer_numel] in host memory; set it before `stage_out`."""
        if self._trailers is not None:
            return self._trailers.outgoing.numpy()
        array: Array = self.outgoing_array[self.numel :]
        return array

    @property
    def incoming_trailer(self) -> Array:
        """The trailer that came back, as a NumPy view [trailer_numel] in host memory; waits for it."""
        if self._trailers is not None:
            self._trailers.wait_in()
            return self._trailers.incoming.numpy()
        array: Array = self.incoming_array[self.numel :]
        return array

    def begin_stage_out(self) -> None:
        """Have `outgoing_array` hold what `outgoing` and its trailer do, once `staged_out`; free on the CPU."""
        if self._staging is not None:
            self._staging.begin_out(self.numel, self.flag)
        elif self._trailers is not None:
            self._trailers.begin_out(self.flag)

    def staged_out(self) -> bool:
        """Return whether what `begin_stage_out` copies is there; never blocks."""
        return self._staging is None or self._staging.is_out()

    def stage_out(self) -> None:
        """Make `outgoing_array` hold what `outgoing` holds; free on the CPU."""
        self.begin_stage_out()
        self.end_stage_out()

    def end_stage_out(self) -> None:
        """Wait until what `begin_stage_out` copies is there."""
        if self._staging is not None:
            self._staging.wait_out()

    def stage_in(self) -> None:
        """Make `incoming` hold what `incoming_array` holds; free on the CPU."""
        if self._staging is not None:
            self._staging.begin_in()
        elif self._trailers is not None:
            self._trailers.begin_in(looks=self.flag is None)

    def stage_trailer_in(self) -> None:
        """Make `incoming_trailer` hold what `incoming` does, which a compressor has written; free on the CPU."""
        if self._staging is not None:
            self._staging.incoming[self.numel :].copy_(self.incoming[self.numel :])

    def restore(self, outgoing: Tensor, incoming: Tensor, trailer: Array) -> None:
        """Hold what another segment held when its exchange was over and not staged in yet.

        Args:
            outgoing, incoming: [numel], the data.
            trailer: [trailer_numel], what came back.
        """
        self.outgoing[: self.numel].copy_(outgoing)
        self.incoming[: self.numel].copy_(incoming)
        if self._trailers is not None:
            self.incoming[self.numel :].copy_(torch.from_numpy(trailer))
            return
        # From where `stage_in` takes it.
        self.incoming_array[: self.numel] = incoming.numpy()
        self.incoming_trailer[:] = trailer

    def wait_by(self, wait: Callable[[Callable[[], bool]], object]) -> None:
        """Have `wait`, given what is to come true, wait for other ranks' data where lanes are on the device."""
        if self._trailers is not None:
            self._trailers.wait = wait

    def sent_is_finite(self, start: int = 0, stop: int | None = None) -> bool:
        """Return whether elements of what was sent are neither NaN nor Inf.

        Args:
            start, stop: of the data; all of it by default. Of a part this waits for the device, where lanes are there.
        """
        if self._trailers is not None and self.flag is None and stop is None:
            return self._trailers.was_finite()
        sent = self.outgoing_array[start : self.numel if stop is None else stop]
        finite = np.isfinite(sent) if self._trailers is None else torch.isfinite(sent)
        return bool(finite.all())

    @property
    def staged(self) -> bool:
        """Whether what travels is copied to host memory and back."""
        return self._staging is not None

    @property
    def on_device(self) -> bool:
        """Whether the buffers lie elsewhere than in host memory."""
        return self.outgoing.device.type != "cpu"

    def __repr__(self) -> str:
        return f"<Segment {self.name}: {len(self.spans)} parameters, {self.wire_bytes} bytes>"


def allocate(peer: Peer, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed flat tensor: on the CPU from the transport's memory, which its ranks may share."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    memory = peer.memory.allocate(numel * dtype.itemsize)
    flat = torch.from_numpy(memory).view(dtype).zero_()
    # As long as the tensor lives: `share_memory_` moves a tensor's storage away, under what ranks still write into.
    flat.hocket_memory = memory  # type: ignore[attr-defined]
    return flat


def view_of(flat: Tensor, span: ParameterSpan) -> Tensor:
    """Return the parameter's view of a flat buffer, with its own shape and strides."""
    return flat.as_strided(span.shape, span.stride, flat.storage_offset() + span.start)
