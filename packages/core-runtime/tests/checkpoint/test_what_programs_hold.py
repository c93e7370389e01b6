"""What programs hold beside plain tensors: a resumed run goes on from all of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import hocket
from hocket.errors import CheckpointError

RANKS, STEPS, SAVED = 2, 6, 3


def on_ranks(call: Callable[[int], Any], ranks: int = RANKS) -> list[Any]:
    return hocket.virtual(ranks).run(lambda: call(hocket.join().rank))


class Scaled(nn.Module):
    """A layer whose scale follows its steps, as those of FP8 layers do, and whose cache grows."""

    cache: Tensor
    first: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = 1.0
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale *= 0.9
            self.cache = torch.cat([self.cache, x.detach().mean().reshape(1)])
            if self.first is None:
                self.first = x.detach().clone()
            self.register_buffer("late", self.cache.sum(), persistent=False)
        y: Tensor = self.norm(self.layer(x)) * self.scale + self.cache.sum()
        return y

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "history": torch.full((2,), self.scale), "raw": b"\x01"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["raw"] == b"\x01"
        assert state["history"][0] == torch.tensor(state["scale"])
        self.scale = state["scale"]


class Halves(Tensor):
    """A tensor that is kept as two of its halves' sizes, as 8-bit optimizers keep their state."""

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor, dtype: torch.dtype) -> Halves:
        made: Halves = Tensor._make_wrapper_subclass(cls, high.shape, dtype=dtype)
        return made

    def __init__(self, high: Tensor, low: Tensor, dtype: torch.dtype) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, *_: Any) -> Halves:
        return cls(parts["high"], parts["low"], *context)

    def whole(self) -> Tensor:
        return self.high.to(torch.float64) + self.low.to(torch.float64)

    @classmethod
    def of(cls, value: Tensor) -> Halves:
        high = value.to(torch.bfloat16)
        return cls(high, (value - high).to(torch.float32), value.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return return_and_correct_aliasing(
                func, args, kwargs or {}, cls(args[0].high, args[0].low, args[0].dtype)
            )
        raise NotImplementedError(func)


class Odd(torch.optim.Optimizer):
    """SGD with momentum whose state is of many kinds."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "kept_in": torch.float64, "on": torch.device("cpu")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["kept_in"] is torch.float64
            for parameter in group["params"]:
                state = self.state[parameter]
                last = state.setdefault("last", deque(maxlen=2))
                last.append(parameter.grad.to(torch.float64))
                momentum = state["momentum"].whole() if "momentum" in state else 0.0
                momentum = 0.9 * momentum + sum(last)
                state["momentum"] = Halves.of(momentum)
                parameter.add_(momentum.to(parameter.dtype), alpha=-group["lr"])


def train(
    rank: int,
    folder: Path,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    resumed: bool = False,
    strategy: str = "dpsgd",
) -> dict[str, Any]:
    model = Scaled().to(dtype)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]
    with hocket.attach(model, optimizer, strategy, initial="keep") as session:
        if resumed:
            session.load(folder)
        for x in batches[session.step :]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if session.step == SAVED and not resumed:
                session.save(folder)
    kept = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    return {**kept, "scale": model.scale}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (Odd, torch.float32),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), torch.float32),
    ],
    ids=["odd", "sgd"],
)
def test_a_resumed_run_goes_on_from_all_of_it(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = on_ranks(lambda rank: train(rank, tmp_path, make, dtype=dtype))
    resumed = on_ranks(lambda rank: train(rank, tmp_path, make, dtype=dtype, resumed=True))
    for one, other in zip(whole, resumed, strict=True):
        assert one.keys() == other.keys()
        assert one["cache"].shape == (STEPS,)
        assert [
            name for name in one if not torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))
        ] == []


class Precise(torch.optim.SGD):
    """SGD whose momentum is of float32, whatever the parameters are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                held = state.setdefault("held", [torch.zeros_like(parameter, dtype=torch.float32)])
                held[0].mul_(0.9).add_(parameter.grad)
                assert held[0].dtype is torch.float32
                parameter.add_(held[0].to(parameter.dtype), alpha=-group["lr"])


def test_state_keeps_the_dtype_that_the_optimizer_gave_it(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return Precise(parameters, lr=0.1)

    whole = on_ranks(lambda rank: train(rank, tmp_path, make, dtype=torch.bfloat16))
    resumed = on_ranks(lambda rank: train(rank, tmp_path, make, dtype=torch.bfloat16, resumed=True))
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one if name != "scale")


def test_every_rank_begins_with_the_dtypes_of_rank_0s_state() -> None:
    def attach(rank: int) -> list[Tensor]:
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        optimizer = Precise(model.parameters(), lr=0.1)
        if rank == 0:
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        hocket.attach(model, optimizer, "sgd").close()
        return [optimizer.state[parameter]["held"][0].clone() for parameter in model.parameters()]

    first, second = on_ranks(attach)
    for one, other in zip(first, second, strict=True):
        assert one.dtype is other.dtype is torch.float32
        assert torch.equal(one, other)


def test_of_another_number_of_ranks_only_statistics_have_a_mean(tmp_path: Path) -> None:
    def model_of() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("vector", torch.zeros(2))
        model.register_buffer("named", torch.zeros(1))
        return model

    def save(rank: int) -> None:
        model = model_of()
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd") as session:
            for name in ("vector", "named", "1.running_mean"):
                model.get_buffer(name).fill_(rank + 1)
            session.save(tmp_path)

    def load(rank: int) -> list[float]:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "dpsgd", statistics=["named"]) as session:
            session.load(tmp_path)
        return [model.get_buffer(name)[0].item() for name in ("vector", "named", "1.running_mean")]

    on_ranks(save, 3)
    assert on_ranks(load, 2) == [[1.0, 2.0, 2.0]] * 2


class Unsavable(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["call"] = print


def test_what_cannot_be_saved_is_told_after_the_first_step(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = Unsavable(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd") as session:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            with pytest.raises(CheckpointError, match="optimizer/state/0/call"):
                session.save(tmp_path)

    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(run)
    [told] = [message for message in caplog.messages if "save would fail" in message]
    assert "optimizer (Unsavable)/state/0/call is of type builtin_function_or_method" in told


def test_a_buffer_of_another_dtype_is_refused(tmp_path: Path) -> None:
    def run(rank: int, dtype: torch.dtype) -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.zeros(2, dtype=dtype))
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            if dtype is torch.float32:
                session.save(tmp_path)
            else:
                session.load(tmp_path)

    on_ranks(lambda rank: run(rank, torch.float32))
    with pytest.raises(CheckpointError, match="mask: this session has int64"):
        on_ranks(lambda rank: run(rank, torch.int64))
