"""Each mechanism's plain alternative, which does the same work, for `mechanisms.py`.

Each function puts the alternative in place of the mechanism while its context lasts, in the process that enters it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hocket.kernels.mixing import JoinedRows, Mix
    from hocket_redsync.kernels.api import Found, Memory, Ranking, Update

Replacement = contextlib.AbstractContextManager[object]

_NEVER = 1 << 62
#: Elements at a time, for NumPy in place of a compiled loop: temporary arrays that a core's cache holds.
_BLOCK = 1 << 15


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or class, and set them back."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def joined(*replacements: Replacement) -> Replacement:
    """Return several as one."""
    stack = contextlib.ExitStack()
    for replacement in replacements:
        stack.enter_context(replacement)
    return stack


# -------------------------------------------------------------------------------- memory that a host's ranks share


def messages() -> Replacement:
    """MPI's messages and collectives over private memory."""
    from hocket.transport.host.memory import HostMemory
    from hocket.transport.mpi import lane
    from hocket.transport.peer import Memory

    return joined(
        replaced(lane, open_host_collectives=lambda lane, capacity_bytes: None),
        replaced(HostMemory, allocate=Memory.allocate, works_in_place=lambda self, data: False),
    )


def second_buffer() -> Replacement:
    """A sum in shared memory that lands beside the contributions."""
    from hocket.collective.allreduce import Allreduce

    return replaced(Allreduce, in_place=lambda self, choices, shared: False)


def numpy_mixing() -> Replacement:
    """Weighted sums in shared memory by NumPy, in blocks that stay in a cache."""
    from hocket.kernels.mixing import Mix

    return replaced(Mix, _write=_mix_by_numpy)


def one_mix_each() -> Replacement:
    """An exchange for each segment, where all that lie in shared memory are one."""
    from hocket.collective.gossip import GossipChannel

    given = GossipChannel.__init__

    def init(self: GossipChannel, peer: Any, segments: Any, *rest: Any, **named: Any) -> None:
        given(self, peer, segments, *rest, **named)
        self.groups = [[segment] for segment in segments]

    return replaced(GossipChannel, __init__=init)


def _mix_by_numpy(self: Mix, terms: JoinedRows, numels: Any) -> list[int]:
    from hocket.kernels.mixing import _component

    size = self._values.shape[1]
    nonfinite: set[int] = set()
    first = 0
    for place, numel in enumerate(numels.tolist()):
        starts = terms.starts[place]
        last = first + int(starts[-1])
        sources, weights = terms.sources[first:last], terms.weights[first:last]
        first = last
        members = _component(self._rank, starts, sources).tolist()
        share = -(-numel // len(members))
        begin = min(members.index(self._rank) * share, numel)
        end = min(begin + share, numel)
        values = [_floats(int(self._values[place, rank]), numel, self._dtype) for rank in range(size)]
        outs = [_floats(int(self._outs[place, rank]), numel, self._dtype) for rank in range(size)]
        for start in range(begin, end, _BLOCK):
            block = slice(start, min(start + _BLOCK, end))
            sums = []
            for rank in members:
                own = range(int(starts[rank]), int(starts[rank + 1]))
                total = weights[own[0]] * values[sources[own[0]]][block]
                if not np.isfinite(total.sum()):
                    nonfinite.add(int(sources[own[0]]))
                for term in own[1:]:
                    total += weights[term] * values[sources[term]][block]
                sums.append(total)
            for rank, total in zip(members, sums, strict=True):
                outs[rank][block] = total
    return sorted(nonfinite)


def _floats(address: int, numel: int, dtype: Any) -> Any:
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype=dtype)


# ----------------------------------------------------------------------------------------------- compiled passes


def torch_copy() -> Replacement:
    """Gradients copied by torch, and a pass of its own that looks for NaN and Inf."""
    from hocket.session.exchange import segment_state

    return replaced(segment_state, _SMALLEST_STREAM=_NEVER)


def torch_merge() -> Replacement:
    """A delayed exchange merged by torch's passes, one for each operation."""
    from hocket.session.exchange import parameters

    return replaced(parameters, _SMALLEST_FUSED=_NEVER)


def ordinary_stores() -> Replacement:
    """The compiled loops, which write by way of the caches."""
    from hocket.kernels import copying
    from hocket.kernels.mixing import Mix

    copied: Callable[..., None] = copying._scaled_copy
    given = Mix.__init__

    def init(self: Mix, *rest: Any) -> None:
        given(self, *rest)
        self._streams[:] = False

    return joined(
        replaced(copying, _scaled_copy=lambda *values: copied(*values[:-1], False)),
        replaced(Mix, __init__=init),
    )


# -------------------------------------------------------------------------------------------------------- waiting


def no_polls() -> Replacement:
    """A wait sleeps from its first look on."""
    from hocket.transport import pending

    return replaced(pending, poll_briefly=lambda done, yields: False)


def no_futex() -> Replacement:
    """A wait for other ranks of the host sleeps between looks, as long as one for messages."""
    from hocket.transport.host import marks
    from hocket.transport.host.operation import HostOperation
    from hocket.transport.pending import PendingCall

    return joined(
        replaced(HostOperation, _sleep=PendingCall._sleep), replaced(marks, wake=lambda address: None)
    )


def no_pipe() -> Replacement:
    """Ranks that carry out a schedule look for messages, and nobody wakes them."""
    from hocket.transport.host.wake import HostWake

    return replaced(HostWake, _open=lambda self, pipe: None)


def no_looks() -> Replacement:
    """Nothing is looked at while the training thread computes."""
    from hocket.progress.inline import InlineProgress

    return replaced(InlineProgress, advance=lambda self: None)


# -------------------------------------------------------------------------------------------- messages and draws


def open_mpis_eager_limit() -> Replacement:
    """Open MPI's own: a handshake above 64 KiB."""
    return replaced_environment(OMPI_MCA_btl_tcp_eager_limit=str(1 << 16))


def numpys_get_state() -> Replacement:
    """NumPy's random state read and written by its own functions, at each switch of threads."""
    from numpy.random import mtrand

    from hocket import randomness

    def read(previous: Any) -> Any:
        generator = mtrand.get_bit_generator()
        return randomness._NumpyState(generator, np.random.get_state(legacy=False), None)

    return replaced(randomness, _read_numpy=read)


def one_draw_each() -> Replacement:
    """Each segment's partners are drawn when they are asked for."""
    from hocket_crossover.rounds import Rounds

    return replaced(Rounds, of=lambda self, round, segment: self._draw([(round, segment)])[0])


# ------------------------------------------------------------------------------------------------------ selection


def torch_topk() -> Replacement:
    """The threshold of the k largest from torch.topk."""
    import torch

    from hocket.compressor import topk

    def largest(magnitudes: Any, count: int) -> Any:
        threshold = torch.topk(torch.from_numpy(magnitudes), count).values[-1].numpy()
        passing = np.flatnonzero(~(magnitudes < threshold))
        above = magnitudes[passing] != threshold
        return np.sort(np.concatenate([passing[above], passing[~above]])[:count])

    return replaced(topk, largest_places=largest)


def exact_selection() -> Replacement:
    """The k largest by a partition of all elements."""
    from hocket_redsync import part
    from hocket_redsync.selection import _exact

    def select(
        kernels: Any, memory: Any, ranking: Any, method: Any, k: int, found: Any, floor: int, age: int
    ) -> Any:
        return _exact(memory, ranking, k)

    return replaced(part, select=select)


def separate_passes() -> Replacement:
    """A residual's update and the search for what is large as passes of torch and NumPy."""
    from hocket_redsync.kernels.cpu import CpuKernels

    return replaced(CpuKernels, advance=_advance_by_passes)


def _advance_by_passes(
    self: Any, memory: Memory, update: Update | None, ranking: Ranking, floor: int, capacity: int
) -> Found:
    from hocket_redsync.kernels.api import Found

    if update is not None:
        given = memory.given if update.parameter is None else memory.given + update.decay * update.parameter
        if update.momentum:
            assert memory.velocity is not None
            memory.velocity.mul_(update.momentum).add_(given)
            given = given + update.momentum * memory.velocity if update.nesterov else memory.velocity
        memory.residual.add_(given)
    values = memory.residual.numpy()
    passing = np.flatnonzero(ranking.keys(values) >= floor)
    found = passing[:capacity]
    return Found((found + memory.start).astype(np.int32), values[found], len(passing))


# -------------------------------------------------------------------------------------- the process's environment


def glibcs_allocator() -> Replacement:
    """What glibc does with freed memory unless it is told."""
    from hocket.launch import rank_process

    return replaced(rank_process, ALLOCATOR={})


@contextlib.contextmanager
def replaced_environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that are started, and set them back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


Alternative = Callable[[], Replacement]
