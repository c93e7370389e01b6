"""What ranks compare of their batches when a pass begins: whether they are given the same ones, or should be."""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.errors import DisagreementError

__all__ = ["check_facts", "fingerprint", "warn_of_shares"]

_log = logging.getLogger("hocket")


def fingerprint(batch: Any) -> int | None:
    """Return a checksum of a batch's numbers and text; None where it holds nothing that can be compared."""
    checksum, found = 0, False
    for piece in _pieces(batch):
        checksum, found = zlib.crc32(piece, checksum), True
    return checksum if found else None


def warn_of_shares(told: Sequence[tuple[int, int | None]]) -> None:
    """Warn where shares of the samples are the same, or the ranks of one share read different ones.

    Args:
        told: by rank, the share that it reads and its first batch's fingerprint.
    """
    known = [(rank, share, mark) for rank, (share, mark) in enumerate(told) if mark is not None]
    first: dict[int, tuple[int, int]] = {}
    for rank, share, mark in known:
        other, expected = first.setdefault(share, (rank, mark))
        if mark != expected:
            _log.warning(
                "ranks %d and %d hold parts of one model replica and are given different batches: use hocket.loader, "
                "or read share session.data_rank of session.data_size",
                other,
                rank,
            )
            return
    for mark in dict.fromkeys(mark for _, mark in first.values()):
        same = [rank for rank, own in first.values() if own == mark]
        if len(same) > 1:
            everyone = len(same) == len({share for share, _ in told})
            who = f"all {len(told)} ranks" if everyone else f"ranks {', '.join(map(str, same))}"
            _log.warning("%s are given the same batches: use hocket.loader, or say same_batches=True", who)


def check_facts(told: Sequence[list[dict[str, Any]]]) -> None:
    """Refuse loaders that would not share the samples out, because they differ between ranks.

    Args:
        told: by rank, the facts of the loaders of `hocket.loader` that it reads.

    Raises:
        DisagreementError: names the first that differs.
    """
    for rank, own in enumerate(told):
        if len(own) != len(told[0]):
            raise DisagreementError(
                f"rank {rank} reads {len(own)} of hocket.loader's loaders in this pass, and rank 0 {len(told[0])}: all "
                "ranks have to read the same ones"
            )
        for mine, expected in zip(own, told[0], strict=True):
            for key in {**expected, **mine}:
                if mine.get(key) != expected.get(key):
                    raise DisagreementError(
                        f"hocket.loader: {key} is {mine.get(key)} on rank {rank} and {expected.get(key)} on rank 0, so "
                        "that the ranks' samples would overlap: give all ranks the same dataset, arguments and sampler"
                    )


def _pieces(value: Any) -> Iterator[Any]:
    """Yield the bytes of everything in a batch that has a content."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not (value.is_meta or value.is_nested or value.is_quantized):
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        if value.dtype != object:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    elif isinstance(value, str | bytes | bool | int | float | np.generic):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        yield from _pieces(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pieces(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _pieces([getattr(value, field.name) for field in dataclasses.fields(value)])
