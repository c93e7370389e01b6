"""A segment: the unit of exchanges, with a flat buffer to send and another for the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hocket.arrays import Array
from hocket.segment.partition import ParameterSpan
from hocket.segment.shape import SegmentShape
from hocket.segment.staging import Staging, TrailerStaging
from hocket.transport.peer import Peer
from hocket.transport.request import Request


class Segment(SegmentShape):
    """A segment: flat buffers of one dtype and device for a run of parameters.

    Sent data and results have different buffers: no reader sees a half-received value, and the native allreduce of MPI
    libraries is up to four times faster so.

    Attributes:
        name: the exchange and this segment's number in it, for instance `gradients.0[3]`.
        index: the segment's number in its exchange.
        spans: the parameters and their offsets.
        numel: elements of data, padding included.
        outgoing: this rank's contribution, [numel + trailer_numel]; must not change while an exchange runs.
        incoming: the exchange's result, [numel + trailer_numel].
        trailer_numel: number of values that travel behind the data through the same linear combination. For gradients:
            the rank's weight, its number of non-finite segments, and for each parameter whether it had a gradient.
        outgoing_trailer: the trailer to send, a NumPy view [trailer_numel] in host memory; set it before `stage_out`.
        outgoing_array, incoming_array: the same for transports: the buffers' memory, their twins in pinned memory where
            they lie on a GPU and lanes do not, and the buffers themselves where lanes are on the GPU, too.
        finite: whether `outgoing` holds neither NaN nor Inf in this round; None before a check.
        flag: the index in `outgoing` of the one trailer value that the device writes and sends; None where the host
            writes them all.
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
            on_lanes: whether lanes take buffers on this device, so that only trailers are copied to host memory.
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
            self.outgoing_trailer: Array = self._trailers.outgoing.numpy()
            return
        if self.on_device:
            self._staging = Staging(outgoing, incoming)
        on_host = self._staging or self
        self.outgoing_array = on_host.outgoing.detach().numpy()
        self.incoming_array = on_host.incoming.detach().numpy()
        self.outgoing_trailer = self.outgoing_array[self.numel :]

    @property
    def incoming_trailer(self) -> Array:
        """Wait for the received trailer; return a NumPy view [trailer_numel] in host memory."""
        if self._trailers is not None:
            self._trailers.wait_in()
            return self._trailers.incoming.numpy()
        array: Array = self.incoming_array[self.numel :]
        return array

    def begin_stage_out(self) -> Request | None:
        """Begin to copy `outgoing` and its trailer into `outgoing_array`; free on the CPU.

        Returns:
            The copy's request; None where lanes can read `outgoing_array` at once.
        """
        if self._staging is not None:
            return self._staging.begin_out(self.numel, self.flag)
        if self._trailers is not None:
            self._trailers.begin_out(self.flag)
        return None

    def stage_out(self) -> None:
        """Copy `outgoing` into `outgoing_array`; free on the CPU."""
        copy = self.begin_stage_out()
        if copy is not None:
            copy.wait()

    def stage_in(self) -> None:
        """Copy `incoming_array` into `incoming`; free on the CPU."""
        if self._staging is not None:
            self._staging.begin_in()
        elif self._trailers is not None:
            self._trailers.begin_in(looks=self.flag is None)

    def stage_trailer_in(self) -> None:
        """Copy the trailer in `incoming`, which a compressor has written, into `incoming_trailer`; free on the CPU."""
        if self._staging is not None:
            self._staging.incoming[self.numel :].copy_(self.incoming[self.numel :])

    def restore(self, outgoing: Tensor, incoming: Tensor, trailer: Array) -> None:
        """Restore the data of a segment whose exchange was over and not staged in yet.

        Args:
            outgoing, incoming: [numel], the data.
            trailer: [trailer_numel], the received one.
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
        """Use `wait`, called with a condition, to wait for other ranks' data, where lanes are on the device."""
        if self._trailers is not None:
            self._trailers.wait = wait

    def sent_is_finite(self, start: int = 0, stop: int | None = None) -> bool:
        """Return whether elements of the sent data are neither NaN nor Inf.

        Args:
            start, stop: the range in the data; all of it by default. For a part this waits for the device, where lanes
                are there.
        """
        if self._trailers is not None and self.flag is None and stop is None:
            return self._trailers.was_finite()
        sent = self.outgoing_array[start : self.numel if stop is None else stop]
        finite = np.isfinite(sent) if self._trailers is None else torch.isfinite(sent)
        return bool(finite.all())

    @property
    def staged(self) -> bool:
        """Tell whether sent and received data are copied to host memory and back."""
        return self._staging is not None

    @property
    def on_device(self) -> bool:
        """Tell whether the buffers are outside of host memory."""
        return self.outgoing.device.type != "cpu"

    def __repr__(self) -> str:
        return f"<Segment {self.name}: {len(self.spans)} parameters, {self.wire_bytes} bytes>"


def allocate(peer: Peer, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed flat tensor [numel]; on the CPU from the transport's memory, which its ranks may share."""
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


def own_storage_of(flat: Tensor, span: ParameterSpan) -> Tensor:
    """Return what `view_of` returns, with a storage of its own over the same memory.

    Writers of files take tensors of one storage for one tensor: Accelerate drops all but one, safetensors refuses them.
    On devices that DLPack does not know, it has the flat buffer's.
    """
    if flat.device.type not in {"cpu", "cuda"}:
        return view_of(flat, span)
    values: Tensor = from_dlpack(flat[span.start : span.start + span.numel])
    return values.as_strided(span.shape, span.stride)
