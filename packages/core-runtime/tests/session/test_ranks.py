"""Ranks that were started differently are told, all of them, before a byte of model moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import flat, mlp, on_ranks

import hocket
from hocket.errors import DisagreementError
from hocket.session.ranks import agree, broadcast_tensors


class _Numbers(dict[str, Any]):
    """What one rank of three is started with."""


def started(rank: int, **different: Callable[[], Any]) -> _Numbers:
    """Return the arguments of attach; rank 1 has the `different` ones."""
    arguments: dict[str, Callable[[], Any]] = {
        "model": lambda: mlp(rank),
        "optimizer": lambda: torch.optim.SGD,
        "strategy": lambda: hocket.compose("sgd"),
        "initial": lambda: "rank0",
        "on_nonfinite": lambda: "error",
    }
    if rank == 1:
        arguments |= different
    return _Numbers({name: make() for name, make in arguments.items()})


def frozen_mlp() -> nn.Module:
    model = mlp(1)
    model[0].weight.requires_grad_(False)
    return model


def with_buffer() -> nn.Module:
    model = mlp(1)
    model.register_buffer("mask", torch.zeros(2))
    return model


DIFFERENCES: dict[str, tuple[dict[str, Callable[[], Any]], str]] = {
    "strategy": (
        {"strategy": lambda: hocket.compose("agd")},
        r'strategy\.gradients\.0\.overlap: "none" on ranks 0, 2, "backward" on rank 1',
    ),
    "another slot": (
        {"strategy": lambda: hocket.compose("periodic_average")},
        r'differently:\n  strategy: "sgd" on ranks 0, 2, "periodic_average" on rank 1\n(.|\n)*'
        r'strategy\.gradients\.0\.collective\.name: "allreduce" on ranks 0, 2, "nothing" on rank 1',
    ),
    "shape": (
        {"model": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()},
        r'parameter\.0\.weight: "float64\[7, 5\]" on ranks 0, 2, "float64\[8, 5\]" on rank 1',
    ),
    "dtype": (
        {"model": lambda: mlp(1, torch.float32)},
        r'parameter\.0\.bias: "float64\[7\]" on ranks 0, 2, "float32\[7\]" on rank 1',
    ),
    "fewer parameters": (
        {"model": lambda: mlp(1)[:2]},
        r'parameter\.2\.bias: "float64\[3\]" on ranks 0, 2, "nothing" on rank 1',
    ),
    "frozen": ({"model": frozen_mlp}, r'frozen\.0\.weight: "nothing" on ranks 0, 2, true on rank 1'),
    "buffer": ({"model": with_buffer}, r'buffer\.mask: "nothing" on ranks 0, 2, "float32\[2\].*" on rank 1'),
    "optimizer": (
        {"optimizer": lambda: torch.optim.Adam},
        r'optimizer: "SGD" on ranks 0, 2, "Adam" on rank 1',
    ),
    "initial": ({"initial": lambda: "keep"}, r'initial: "rank0" on ranks 0, 2, "keep" on rank 1'),
    "on_nonfinite": ({"on_nonfinite": lambda: "skip"}, "on_nonfinite"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_is_told(name: str) -> None:
    different, message = DIFFERENCES[name]

    def run(rank: int) -> None:
        arguments = started(rank, **different)
        model = arguments["model"]
        before = flat(model)
        storage = {p.untyped_storage().data_ptr() for p in model.parameters()}
        arguments["optimizer"] = arguments["optimizer"](model.parameters(), lr=0.1)
        with pytest.raises(DisagreementError, match=message):
            hocket.attach(**arguments)
        assert torch.equal(flat(model), before)
        assert {p.untyped_storage().data_ptr() for p in model.parameters()} == storage
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    on_ranks(3, run)


def test_equal_ranks_agree() -> None:
    def run(rank: int) -> None:
        arguments = started(rank)
        arguments["optimizer"] = arguments["optimizer"](arguments["model"].parameters(), lr=0.1)
        hocket.attach(**arguments).close()

    on_ranks(3, run)


def test_long_lists_are_cut() -> None:
    def run(rank: int) -> str:
        with pytest.raises(DisagreementError) as raised:
            agree(hocket.join(), {"parameter": {f"p{i:02}": rank for i in range(20)}})
        return str(raised.value)

    message, other = on_ranks(2, run)
    assert message == other
    assert "  parameter.p07: 0 on rank 0, 1 on rank 1\n  and 12 more" in message
    assert "p08" not in message


def test_tensors_of_every_kind_and_size_become_those_of_one_rank() -> None:
    """Those that travel together, longer ones between them, and as many as take several messages."""
    kinds = (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.complex64)

    def made(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        small = [torch.randn(3, 2).to(kind) for kind in kinds]
        unusual = [torch.randn(4, 3).T, torch.randn(()), torch.empty(0), torch.randn(2, 3, 5, 7)[:, 1]]
        long = [torch.randn(1_200_000)]
        return [*small, *long, *unusual, *(torch.randn(7000) for _ in range(300))]

    def run(rank: int) -> list[torch.Tensor]:
        tensors = made(rank)
        lane = hocket.join().lane("test")
        broadcast_tensors(tensors, lane, 1)
        lane.close()
        return tensors

    for of_rank in on_ranks(3, run):
        assert all(torch.equal(own, given) for own, given in zip(of_rank, made(1), strict=True))
