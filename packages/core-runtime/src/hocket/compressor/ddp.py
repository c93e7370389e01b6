"""A compressor for users who keep DistributedDataParallel: its communication hook.

model = DistributedDataParallel(model)
model.register_comm_hook(None, hocket.ddp_comm_hook(hocket.chain("error_feedback", {"name": "topk", "density": 0.01})))
"""

# Annotations are evaluated here: DistributedDataParallel compares the hook's with classes, not with text.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from hocket.compressor.api import Compressor, Message, State
from hocket.compressor.checked import message_of
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment, view_of
from hocket.segment.shape import wire_dtype

_Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def ddp_comm_hook(compressor: Compressor, group: dist.ProcessGroup | None = None) -> _Hook:
    """Return a hook that gives every rank the mean of the ranks' compressed gradients.

    The first step's gradients are averaged uncompressed: DistributedDataParallel cuts its buckets anew after it.
    Residuals live in the hook, and are in no checkpoint; with `hocket.attach` they are.

    Args:
        compressor: one that works on one bucket at a time and leaves the optimizer alone.
        group: the model's process group; the default one if None.

    Raises:
        ValueError: the compressor has to see all gradients before the first is sent, or takes over terms of
            the optimizer: there, use `hocket.attach`.
    """
    if compressor.traits.prepares:
        raise ValueError(
            "the compressor needs all gradients before it sends the first, but DistributedDataParallel shows it one "
            "bucket at a time: use hocket.attach, or clip without local_clipping"
        )
    if compressor.traits.answers:
        raise ValueError(
            "the compressor needs the sum of its first message before it sends the second, but this hook sends only "
            "one: use hocket.attach, or torch's own powerSGD_hook"
        )
    terms = compressor.traits.applies_optimizer_terms
    if terms:
        raise ValueError(
            f"the compressor takes over the optimizer's {' and '.join(sorted(terms))}, but DDP's optimizer would "
            "apply it a second time: use hocket.attach, or leave momentum_correction out"
        )
    return _CommHook(compressor, group).exchange


class _BucketState:
    """A bucket: its segment and the compressor's state."""

    def __init__(self, bucket: GradBucket, compressor: Compressor) -> None:
        named = [(f"bucket {bucket.index()} parameter {i}", p) for i, p in enumerate(bucket.parameters())]
        spans = partition(named_spans(named), Model())[0]
        numel = spans[-1].start + spans[-1].padded_numel
        dtype, device = wire_dtype(spans[0].dtype), bucket.buffer().device
        outgoing, incoming = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
        self.segment = Segment(f"bucket {bucket.index()}", bucket.index(), spans, outgoing, incoming)
        self.state: State = compressor.init(self.segment)

    def read(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Copy a bucket's gradients, scaled, to where the compressor reads them."""
        for span, gradient in zip(self.segment.spans, gradients, strict=True):
            view_of(self.segment.outgoing, span).copy_(gradient).mul_(scale)
        self.segment.stage_out()

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Copy the result into the bucket."""
        for span, gradient in zip(self.segment.spans, gradients, strict=True):
            gradient.copy_(view_of(self.segment.incoming, span))


class _CommHook:
    """The hook's state: a place for each bucket, and the step's number."""

    def __init__(self, compressor: Compressor, group: dist.ProcessGroup | None) -> None:
        self._compressor = compressor
        self._group = group
        self._round = -1
        self._places: dict[tuple[int, ...], _BucketState] = {}

    def exchange(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of one bucket; the result is the mean, in the bucket's own buffer."""
        if self._round < 0:
            future = self._average(bucket)
        else:
            key = tuple(id(parameter) for parameter in bucket.parameters())
            if key not in self._places:
                self._places[key] = _BucketState(bucket, self._compressor)
            future = self._exchange_compressed(bucket, self._places[key], self._round)
        self._round += bucket.is_last()
        return future

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        mean: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return mean

    def _exchange_compressed(
        self, bucket: GradBucket, place: _BucketState, round: int
    ) -> torch.futures.Future[Tensor]:
        gradients, segment = bucket.gradients(), place.segment
        buffer: Tensor = bucket.buffer()
        place.read(gradients, 1 / dist.get_world_size(self._group))
        payload = message_of(self._compressor, segment, place.state, round).payload
        own = torch.from_numpy(payload).to(buffer.device)
        if self._compressor.traits.reducible:
            # Into memory of its own: the payload may be the segment's.
            received = [own.clone()]
            work = dist.all_reduce(received[0], group=self._group, async_op=True)
        else:
            received = self._receive_buffers(own)
            own = torch.nn.functional.pad(own, (0, len(received[0]) - len(own)))
            work = dist.all_gather(received, own, group=self._group, async_op=True)

        def decode(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            segment.incoming.zero_()
            for each in received:
                message = Message(each.cpu().numpy(), segment, round)
                self._compressor.accumulate(message, 1.0, segment.incoming)
            self._compressor.to_values(segment, segment.incoming[: segment.numel])
            place.write(gradients)
            return buffer

        decoded: torch.futures.Future[Tensor] = work.get_future().then(decode)
        return decoded

    def _receive_buffers(self, own: Tensor) -> list[Tensor]:
        """Return a buffer for each rank's message, as long as the longest."""
        size = dist.get_world_size(self._group)
        longest = len(own)
        if not self._compressor.traits.equal_sizes:
            lengths = torch.tensor([longest], device=own.device)
            dist.all_reduce(lengths, dist.ReduceOp.MAX, group=self._group)
            longest = int(lengths)
        return [own.new_empty(longest) for _ in range(size)]
