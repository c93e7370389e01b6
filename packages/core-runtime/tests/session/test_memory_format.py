"""Parameters whose elements lie in another order, on another rank or in another run, are never mixed up."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import flat, on_ranks

import hocket
from hocket.errors import CheckpointError, DisagreementError
from hocket.segment.partition import unusual_strides

LAST = torch.channels_last


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(20, 2)).double()


def attach(model: nn.Module, strategy: str | dict[str, Any]) -> hocket.Session:
    return hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)


def step(session: hocket.Session, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(3, 3, 3, 3, generator=generator, dtype=torch.float64)
    session.optimizer.zero_grad()
    F.cross_entropy(session.model(x), torch.tensor([0, 1, 1])).backward()
    session.optimizer.step()


@pytest.mark.parametrize("strategy", ["sgd", "agd", "dpsgd", "periodic_average"])
def test_another_order_on_one_rank_is_refused_by_name(strategy: str) -> None:
    def run(rank: int) -> None:
        model = images()
        if rank == 1:
            model.to(memory_format=LAST)  # type: ignore[call-overload]
        with pytest.raises(DisagreementError, match=r"parameter\.0\.weight.*strides \[12, 1, 6, 3\]"):
            attach(model, strategy)

    on_ranks(2, run)


def test_one_order_on_all_ranks_is_trained() -> None:
    def run(rank: int, *, last: bool) -> Tensor:
        model = images()
        if last:
            model.to(memory_format=LAST)  # type: ignore[call-overload]
        with attach(model, "sgd") as session:
            for number in range(3):
                step(session, rank, number)
        return flat(model)

    plain = on_ranks(2, lambda rank: run(rank, last=False))
    for one, other in zip(plain, on_ranks(2, lambda rank: run(rank, last=True)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


SPARSE = {
    "gradients": [
        {
            "collective": "sparse_allreduce",
            "compressor": {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.3}},
        }
    ]
}


@pytest.mark.parametrize("strategy", ["sgd", SPARSE, "overlap_sgp"])
def test_a_checkpoint_goes_on_in_another_order_where_nothing_lies_in_it(
    strategy: str | dict[str, Any], tmp_path: Path
) -> None:
    """Parameters and momentum are kept by index; residuals and messages under way by place, and are refused."""

    def run(rank: int, *, last: bool) -> Tensor | None:
        first = images()
        with attach(first, strategy) as session:
            for number in range(3):
                step(session, rank, number)
            session.save(tmp_path / str(last))
            for number in range(3, 6):
                step(session, rank, number)
        model = images()
        if last:
            model.to(memory_format=LAST)  # type: ignore[call-overload]
        resumed = attach(model, strategy)
        if last and strategy != "sgd":
            with pytest.raises(CheckpointError, match=r"\.0: parameter 0\.weight had "):
                resumed.load(tmp_path / str(last))
            resumed.inner.abandon()
            return None
        with resumed:
            resumed.load(tmp_path / str(last))
            for number in range(3, 6):
                step(resumed, rank, number)
        torch.testing.assert_close(flat(model), flat(first), rtol=0, atol=1e-12)
        return flat(model)

    for last in (False, True):
        on_ranks(2, partial(run, last=last))


def test_strides_of_axes_of_length_1_say_nothing() -> None:
    one = torch.zeros(4, 3, 1, 1)
    assert unusual_strides(one.shape, one.stride()) is None
    assert unusual_strides(one.shape, one.to(memory_format=LAST).stride()) is None
    assert unusual_strides((3, 4), (1, 3)) == [1, 3]
    assert unusual_strides((), ()) is None
