"""The strategy's state in a checkpoint, by keys that say who holds it and which parameter it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hocket.checkpoint.files import StateFile
from hocket.checkpoint.tree import unflatten
from hocket.session.exchange.parameters import MixState

#: By the segment's index, its elements, and of each parameter its name, first element, shape and strides.
SavedSpans: TypeAlias = "dict[str, tuple[int, list[tuple[str, int, list[int], list[int]]]]]"

#: Keys on the way to a channel's tensors, which say nothing about them.
_WITHIN = ("channel", "messages")


def strategy_state(files: Sequence[StateFile], *, whole: bool) -> dict[str, Tensor]:
    """Return what a strategy keeps beside the model, by keys `WHO/EXCHANGE/KIND/PARAMETER`.

    WHO is a rank, such as `rank0003`. It is `all` for outer parameters, and what their optimizer remembers, where all
    ranks have the same bits.

    Args:
        files: of all ranks.
        whole: whether each rank has whole parameters, not shards of them.
    """
    first: dict[str, Tensor] = {}
    outers: list[dict[str, Tensor]] = []
    found: dict[str, Tensor] = {}
    for rank, file in enumerate(files):
        mixes: dict[str, MixState] = file.read("parameters")
        outer = _outer_state(mixes)
        for key, value in outer.items():
            if torch.equal(first.setdefault(key, value), value):
                outer[key] = first[key]  # one copy in memory
        outers.append(outer)
        found |= {f"rank{rank:04d}/{key}": value for key, value in _own_state(file, mixes).items()}
    shared = {key for key, value in first.items() if whole and all(of.get(key) is value for of in outers)}
    for rank, outer in enumerate(outers):
        found |= {f"{'all' if key in shared else f'rank{rank:04d}'}/{key}": outer[key] for key in outer}
    return found


def _outer_state(mixes: Mapping[str, MixState]) -> dict[str, Tensor]:
    """Return outer parameters as kind `outer`, and what is kept beside them as `outer.momentum` and the like."""
    return {
        f"{exchange}/{'outer' if kind == 'outer' else f'outer.{kind}'}/{name}": value
        for exchange, mix in mixes.items()
        for name, kept in mix["outer"].items()
        for kind, value in kept.items()
    }


def _own_state(file: StateFile, mixes: Mapping[str, MixState]) -> dict[str, Tensor]:
    """Return push-sum weights, residuals and other memories of channels, and what is on its way."""
    found = {name: file.tensor(name) for section in ("late", "dropped") for name in file.names(section)}
    for exchange, mix in mixes.items():
        for name, weight in mix["weights"].items():
            found[f"{exchange}/weight/{name}"] = torch.tensor(weight, dtype=torch.float64)
        found |= {f"{exchange}/value/{name}": value for name, value in mix["values"].items()}
    structure: Any = file.structure("exchanges")
    saved = {exchange: dict(content["dict"]).get("spans") for exchange, content in structure["dict"]}
    spans: dict[str, SavedSpans] = {
        exchange: unflatten(of_exchange, file.tensor) or {} for exchange, of_exchange in saved.items()
    }
    for path in file.names("exchanges"):
        _, exchange, *keys = path.split("/")
        found |= _by_parameter(exchange, keys, file.tensor(path), spans[exchange])
    return found


def _by_parameter(exchange: str, keys: Sequence[str], value: Tensor, spans: SavedSpans) -> dict[str, Tensor]:
    """Return a tensor of an exchange, cut by parameter where it has one element for each of the segment's."""
    number = keys[-2] if len(keys) > 1 else ""
    if not number.isdigit():
        return {"/".join([exchange, *keys]): value}
    kind = ".".join(key for key in (*keys[:-2], keys[-1]) if key not in _WITHIN)
    numel, parameters = spans.get(number, (-1, []))  # earlier versions have saved none
    if value.shape != (numel,):
        return {f"{exchange}/{kind}/segment{number}": value}
    return {
        f"{exchange}/{kind}/{name}": value.as_strided(shape, stride, value.storage_offset() + start).clone(
            memory_format=torch.contiguous_format
        )
        for name, start, shape, stride in parameters
    }
