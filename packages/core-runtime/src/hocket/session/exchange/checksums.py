"""Comparison of ranks' tensors by checksums: of bits, in order, read in place."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.checkpoint.files import describe
from hocket.transport.peer import Peer, gather

#: Words of 8 bytes that are summed up together on a device.
_ROW = 1024


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bits, dtype and shape."""
    found = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.numpy().data, found)
    # Sums over rows and over columns, on the device: together they tell where an element lies.
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    rows = flat[: flat.numel() // (8 * _ROW) * (8 * _ROW)].view(torch.int64).view(-1, _ROW)
    sums = torch.cat([rows.sum(0), rows.sum(1), flat[rows.numel() * 8 :].to(torch.int64)])
    return zlib.crc32(sums.cpu().view(torch.uint8).numpy().data, found)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing ranks' tensors by name; the same on all ranks.

    Attributes:
        differing: the names of tensors that not all ranks hold with the same bits, in order.
        alike: those of them with one dtype and shape on all ranks.
        others: by name, the ranks whose tensor differs from rank 0's.
    """

    differing: Sequence[str]
    alike: Sequence[str]
    others: Mapping[str, Sequence[int]]

    def __or__(self, more: Comparison) -> Comparison:
        """Return the comparison of these tensors and of others."""
        return Comparison(
            [*self.differing, *more.differing], [*self.alike, *more.alike], {**self.others, **more.others}
        )


def compare(peer: Peer, tensors: Mapping[str, Tensor], what: str = "allgather") -> Comparison:
    """Compare tensors over ranks, which may have different ones; collective.

    Args:
        peer: the ranks.
        tensors: this rank's, by name.
        what: as in `Peer.allgather_bytes`.
    """
    mine = {name: [describe(tensor), checksum(tensor)] for name, tensor in tensors.items()}
    gathered = gather(peer, mine, what=what)
    held = {name: [of_rank.get(name) for of_rank in gathered] for of_rank in gathered for name in of_rank}
    others = {
        name: [rank for rank, one in enumerate(by_rank) if one != by_rank[0]]
        for name, by_rank in held.items()
    }
    differing = [name for name in held if others[name]]
    alike = [name for name in differing if len({one and one[0] for one in held[name]}) == 1]
    return Comparison(differing, alike, {name: others[name] for name in differing})
