"""The ranks of a session: their hosts, the comparison of their facts, and rank 0's values for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from hocket.checkpoint.subclasses import plain_tensors
from hocket.checkpoint.tree import flatten, unflatten
from hocket.errors import AttachError, DisagreementError
from hocket.plain import flattened
from hocket.segment.shards import is_sharded, local
from hocket.session.island import Island
from hocket.session.step.optimizers import Optimizers
from hocket.strategy.scope import Placement
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather

# So much travels together; any dtype can be read at a multiple of the second.
_TOGETHER_BYTES, _ALIGNMENT_BYTES = 4 << 20, 16


@dataclass(frozen=True)
class Endpoints:
    """This rank's endpoints.

    Attributes:
        peer: among the ranks that exchange: all of them, or this rank's column of sharded replicas.
        host: among the ranks of this rank's host, which can share memory; `peer` where there is one host.
        placement: the host of each rank.
        island: the ranks that hold one replica together with this one.
        device: the device that lanes exchange from, by Gloo or NCCL; None for host memory, by the transport.
    """

    peer: Peer
    host: Peer
    placement: Placement
    island: Island
    device: torch.device | None = None


def local_rank(peer: Peer) -> int:
    """Return the number of this rank among those of its host, from 0; collective."""
    hosts = _placement(peer).hosts
    return hosts[: peer.rank].count(hosts[peer.rank])


def find_ranks(peer: Peer, device: torch.device | None = None, island: Island | None = None) -> Endpoints:
    """Find the hosts of the ranks of `peer`; collective.

    Args:
        peer: the attribute.
        device: the attribute.
        island: the attribute; None for whole models.
    """
    placement = _placement(peer)
    own = placement.hosts[peer.rank]
    neighbours = [rank for rank, host in enumerate(placement.hosts) if host == own]
    host = peer if len(neighbours) == peer.size else peer.group(neighbours)
    assert host is not None  # this rank is its own neighbour
    if island is None:
        return Endpoints(peer, host, placement, Island.alone(peer), device)
    # An island is where its first rank is, so that all of its ranks have the same neighbours.
    of_first = gather(island.own, placement.hosts)[0] if island.own is not None else placement.hosts
    return Endpoints(peer, host, Placement(tuple(of_first)), island, device)


def _placement(peer: Peer) -> Placement:
    return Placement.of([name.decode() for name in peer.allgather_bytes(peer.memory.host_name.encode())])


def agree(
    peer: Peer, facts: Mapping[str, object], refusal: str | None = None, strategy: str | None = None
) -> None:
    """Compare `facts` over all ranks; collective.

    Args:
        peer: the world.
        facts: JSON-able values by name, nested mappings allowed.
        strategy: the strategy's name; if it differs, it is no difference by itself, but the first to be reported.
        refusal: the reason why this rank cannot continue in any case; None if it can.

    Raises:
        AttachError: on every rank: a rank cannot continue; with its reason.
        DisagreementError: on every rank; names the facts that differ, and on which ranks.
    """
    refusals = gather(peer, refusal, what="hocket.attach")
    if refusal is not None:
        raise AttachError(refusal)
    for rank, reason in enumerate(refusals):
        if reason is not None:
            raise AttachError(f"rank {rank} cannot attach: {reason}")
    differences = differing(peer, facts)
    if differences:
        named = differing(peer, {"strategy": strategy})
        lines = [line for line in (named, differences) if line]
        raise DisagreementError("\n".join(["the ranks were started differently:", *lines]))


def differing(
    peer: Peer, facts: Mapping[str, object], what: str = "allgather", numbers: Sequence[int] | None = None
) -> str:
    """Compare `facts` over all ranks; collective.

    Args:
        peer: the ranks.
        facts: JSON-able values by name, nested mappings allowed.
        what: as in `Peer.allgather_bytes`.
        numbers: the session's numbers of the peer's ranks; None where they are the same.

    Returns:
        A line for each of the first facts that differ, with its values and their ranks; empty where none does.
    """
    if peer.size == 1:
        return ""
    mine = json.dumps(facts, sort_keys=True, default=str).encode()
    gathered = peer.allgather_bytes(mine, what=what)
    if all(other == gathered[0] for other in gathered):
        return ""
    flat = [flattened(json.loads(other)) for other in gathered]
    keys = sorted({key for facts_of_rank in flat for key in facts_of_rank})
    lines = []
    for key in keys:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts_of_rank in enumerate(flat):
            value = json.dumps(facts_of_rank.get(key, "nothing"))
            ranks_by_value.setdefault(value, []).append(numbers[rank] if numbers else rank)
        if len(ranks_by_value) > 1:
            values_here = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            lines.append(f"  {key}: {values_here}")
    return "\n".join(lines[:8] + ([f"  and {len(lines) - 8} more"] if len(lines) > 8 else []))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


@torch.no_grad()
def broadcast_model(model: nn.Module, lane: Lane, root: int = 0) -> None:
    """Give every rank of a lane the parameters and buffers of `root`; collective."""
    if lane.size > 1:
        held = (local(tensor.data) for tensor in (*model.parameters(), *model.buffers()))
        broadcast_tensors([plain for tensor in held for plain in plain_tensors(tensor)], lane, root)


@torch.no_grad()
def broadcast_unsharded(model: nn.Module, lane: Lane) -> None:
    """Give every rank of an island the plain parameters and buffers of its first; collective."""
    held = (tensor.data for tensor in (*model.parameters(), *model.buffers()) if not is_sharded(tensor))
    broadcast_tensors([plain for tensor in held for plain in plain_tensors(tensor)], lane, 0)


@torch.no_grad()
def broadcast_optimizers(optimizers: Optimizers, peer: Peer, lane: Lane) -> None:
    """Give every rank the state of rank 0's optimizers (momentum, ...); collective."""
    remember = any(getattr(each, "state", None) for each in (*optimizers.every, *optimizers.called))
    if not any(gather(peer, remember)):
        return
    structure, tensors = flatten(optimizers.state_dict() if peer.rank == 0 else {})
    described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    structure, described = gather(peer, [structure, described])[0]
    if peer.rank != 0:
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
    broadcast_tensors([tensors[name] for name, _, _ in described], lane, 0)
    if peer.rank != 0:
        optimizers.load_state_dict(unflatten(structure, tensors.__getitem__))


def broadcast_tensors(tensors: Sequence[Tensor], lane: Lane, root: int) -> None:
    """Give every rank of a lane the values of tensors of `root`; collective.

    Small ones travel together, as a message takes as long as 100 KB of them.
    """
    for run in _runs(tensors):
        raw = _bytes_of(run[0])
        if len(run) > 1:
            raw = torch.empty(sum(map(_padded, run)), dtype=torch.uint8)
            for tensor, part in _parts(run, raw):
                part.copy_(_bytes_of(tensor))
        lane.ibroadcast(raw.numpy(), root).wait()
        for tensor, part in _parts(run, raw):
            if lane.rank != root and part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _runs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors into runs that travel together."""
    run: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        filled += _padded(tensor)
        if run and filled > _TOGETHER_BYTES:
            yield run
            run, filled = [], _padded(tensor)
        run.append(tensor)
    if run:
        yield run


def _parts(run: Sequence[Tensor], raw: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of a run with its part of the bytes."""
    starts = accumulate(map(_padded, run), initial=0)
    return ((tensor, raw[start : start + tensor.nbytes]) for start, tensor in zip(starts, run, strict=False))


def _padded(tensor: Tensor) -> int:
    """Return the bytes of a tensor, with those up to where any dtype can be read."""
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values as bytes, flat, on the CPU: NumPy does not know every dtype of torch."""
    return tensor.detach().to("cpu").contiguous().resolve_neg().reshape(-1).view(torch.uint8)
