"""The same training with DistributedDataParallel and with a session, case by case, for test_against_ddp.py.

    python ddp_cases.py STORE RESULTS.json

A case is written once, against a `Side`, and run on both. On each rank the model is initialised differently,
so that both sides must begin by giving everyone rank 0's.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.launch.forking import in_each_rank
from hocket.transport.peer import gather

RANKS = 4
IS_FULL = os.environ.get("HOCKET_CELLS") == "all"
STEPS = 20 if IS_FULL else 12
TIMEOUT_S = 30.0

Batches = list[tuple[Tensor, Tensor]]
Weights = dict[str, Tensor]


@dataclass
class Run:
    """A model under training on one side; what both sides offer under the same names."""

    model: nn.Module
    plain: nn.Module
    data: Callable[[Batches], Any]
    accumulate: Callable[[], Any]
    clip_grad_norm_: Callable[[float], Tensor]
    session: hocket.Session | None


class Side:
    """Who carries the gradients: a session with `strategy`, or DDP where that is None."""

    def __init__(self, rank: int, strategy: tuple[str, ...] | None) -> None:
        self.rank = rank
        self.strategy = strategy

    @property
    def is_session(self) -> bool:
        return self.strategy is not None

    @contextmanager
    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, **ddp: Any) -> Iterator[Run]:
        """Carry the model's gradients within the `with` statement; `ddp` are options of that side."""
        if self.strategy is None:
            wrapped = DistributedDataParallel(model, **ddp)
            yield Run(
                wrapped,
                model,
                lambda batches: batches,
                wrapped.no_sync,
                lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
                None,
            )
            return
        with hocket.attach(model, optimizer, hocket.compose(*self.strategy)) as session:
            yield Run(model, model, session.data, session.accumulate, session.clip_grad_norm_, session)


@dataclass(frozen=True)
class Case:
    """A training, the strategy that must equal DDP in it, and how closely."""

    name: str
    train: Callable[[Side], Weights]
    strategy: tuple[str, ...]
    rtol: float
    atol: float


CASES: dict[str, Case] = {}


def case(
    *strategy: str, name: str = "", rtol: float = 2e-5, atol: float = 1e-6
) -> Callable[[Callable[[Side], Weights]], Callable[[Side], Weights]]:
    """Register a training, under its function's name if no other is given."""

    def register(train: Callable[[Side], Weights]) -> Callable[[Side], Weights]:
        key = name or train.__name__
        assert key not in CASES, key
        # In one segment, as which these small models travel by default, nothing would be sent during backward.
        its = ("agd", "gradients.0.segments=layers") if strategy in ((), ("agd",)) else strategy
        CASES[key] = Case(key, train, its, rtol, atol)
        return train

    return register


# --- models, batches, the plain loop ---------------------------------------------------------------------


def mlp(rank: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(
        dtype
    )


def batches(rank: int, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> Batches:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(6, 8, generator=generator).to(dtype), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(steps)
    ]


def weights(model: nn.Module) -> Weights:
    """Copy all that a model holds but batch norm's statistics, which DDP takes from rank 0 and we average."""
    return {name: value.clone() for name, value in model.state_dict().items() if "running" not in name}


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def fit(
    side: Side,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Batches | None = None,
    set_to_none: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **ddp: Any,
) -> Weights:
    """Run the plain loop."""
    with side.train(model, optimizer, **ddp) as run:
        for x, y in run.data(batches(side.rank) if data is None else data):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(run.model(x), y).backward()
            optimizer.step()
    return weights(model)


# --- strategies ------------------------------------------------------------------------------------------


@case("sgd", name="sgd_none_model")
@case("sgd", "gradients.0.segments=layers", name="sgd_none_layers")
@case("agd", "gradients.0.segments=model", name="agd_backward_model")
@case("agd", "gradients.0.segments=layers", name="agd_backward_layers")
@case("agd", "gradients.0.segments={name: bytes, size_mb: 0.001}", name="agd_backward_bytes_0.001")
@case(
    "agd", "gradients.0.segments={name: bytes, size_mb: 0.01, first_mb: 0.0001}", name="agd_backward_growing"
)
def plain(side: Side) -> Weights:
    model = mlp(side.rank)
    return fit(side, model, sgd(model))


@case(name="the_designs_script")
def the_designs_script(side: Side) -> Weights:
    """Three lines in a user's own script, as the design writes them."""
    model = mlp(side.rank)
    optimizer, loss, loader = sgd(model), nn.CrossEntropyLoss(), batches(side.rank)
    if not side.is_session:
        return fit(side, model, optimizer)
    # fmt: off
    strategy = hocket.compose("agd", "gradients.0.segments=layers")  # recipe, file or mapping, then overrides
    with hocket.attach(model, optimizer, strategy) as session:
        for x, y in session.data(loader):
            optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()  # noqa: E702
        session.consensus()                  # the replicas' mean, to evaluate and save
    # fmt: on
    return weights(model)


# --- what a training loop does between backward and step -------------------------------------------------


@case("sgd", name="clipping_none")
@case("agd", name="clipping_backward")
def clipping(side: Side) -> Weights:
    model = mlp(side.rank)
    optimizer = sgd(model)
    norms = []
    with side.train(model, optimizer) as run:
        for step, (x, y) in enumerate(run.data(batches(side.rank))):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            # torch's own function and the session's, in turn.
            clip = (
                run.clip_grad_norm_ if step % 2 else lambda n: nn.utils.clip_grad_norm_(model.parameters(), n)
            )
            norms.append(clip(0.2))
            optimizer.step()
    assert max(norms) > 0.2, "nothing was clipped"
    return {**weights(model), "norms": torch.stack(norms)}


@case("sgd", name="accumulation_none")
@case("agd", name="accumulation_backward")
def accumulation(side: Side) -> Weights:
    model = mlp(side.rank)
    optimizer = sgd(model)
    with side.train(model, optimizer) as run:
        for step, (x, y) in enumerate(run.data(batches(side.rank))):
            if step % 4 == 3:
                (F.cross_entropy(run.model(x), y) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with run.accumulate():
                    (F.cross_entropy(run.model(x), y) / 4).backward()
        if run.session is not None:
            assert run.session.step == STEPS // 4, run.session.step
    return weights(model)


@case()
def scheduler(side: Side) -> Weights:
    model = mlp(side.rank)
    optimizer = sgd(model, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)
    with side.train(model, optimizer) as run:
        for x, y in run.data(batches(side.rank)):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            optimizer.step()
            schedule.step()
    return weights(model)


def _scaled(
    side: Side, optimizer: Callable[[nn.Module], torch.optim.Optimizer], max_norm: float = 0
) -> Weights:
    """Train with a GradScaler, which finds Inf on one rank in step 5."""
    model = mlp(side.rank)
    chosen = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    data = batches(side.rank)
    if side.rank == 2:
        data[5][0][0, 0] = torch.inf
    scales = []
    with side.train(model, chosen) as run:
        for x, y in run.data(data):
            chosen.zero_grad()
            scaler.scale(F.cross_entropy(run.model(x), y)).backward()
            if max_norm:
                scaler.unscale_(chosen)
                run.clip_grad_norm_(max_norm)
            scaler.step(chosen)
            scaler.update()
            scales.append(scaler.get_scale())
        if run.session is not None:
            assert run.session.step == STEPS, run.session.step
    assert scales[5] < scales[4], "no step was left out"
    return {**weights(model), "scales": torch.tensor(scales)}


@case("sgd", name="grad_scaler_none")
@case("agd", name="grad_scaler_backward")
def grad_scaler(side: Side) -> Weights:
    return _scaled(side, sgd)


@case()
def grad_scaler_unscale_and_clip(side: Side) -> Weights:
    return _scaled(side, sgd, max_norm=0.2)


@case()
def grad_scaler_fused(side: Side) -> Weights:
    return _scaled(side, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True))


@case()
def zero_grad_to_zero(side: Side) -> Weights:
    model = mlp(side.rank)
    return fit(side, model, sgd(model, momentum=0.9), set_to_none=False)


@case("sgd", name="two_backwards_none")
@case("agd", name="two_backwards_backward")
def two_backwards(side: Side) -> Weights:
    model = mlp(side.rank)
    optimizer = sgd(model)
    with side.train(model, optimizer) as run:
        for x, y in run.data(batches(side.rank)):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            run.model(x).square().mean().backward()
            optimizer.step()
    return weights(model)


@case()
def ema(side: Side) -> Weights:
    """An EMA copy made after attach: equal weights, and its copied hooks do nothing."""
    model = mlp(side.rank)
    optimizer = sgd(model)
    with side.train(model, optimizer) as run:
        average = torch.optim.swa_utils.AveragedModel(
            run.plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for step, (x, y) in enumerate(run.data(batches(side.rank))):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            optimizer.step()
            average.update_parameters(run.plain)
            if step == STEPS // 2 and side.rank == 1:
                _check_copies_are_inert(run, average, x)
    return {**weights(model), **{f"ema.{key}": value for key, value in weights(average.module).items()}}


def _check_copies_are_inert(run: Run, average: nn.Module, x: Tensor) -> None:
    """Run backward through copies on one rank only: were their hooks alive, the ranks would part."""
    exchanges = run.session.counters.exchanges if run.session else 0
    for duplicate in (average.get_submodule("module"), copy.deepcopy(run.plain)):
        duplicate(x).square().mean().backward()
        assert all(p.grad is not None for p in duplicate.parameters())
    assert run.session is None or run.session.counters.exchanges == exchanges


# --- optimizers ------------------------------------------------------------------------------------------


@case()
def momentum_and_decay(side: Side) -> Weights:
    model = mlp(side.rank)
    return fit(side, model, sgd(model, momentum=0.9, weight_decay=0.01, nesterov=True))


def _adamw(side: Side, **options: Any) -> Weights:
    model = mlp(side.rank)
    return fit(side, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **options))


@case()
def adamw(side: Side) -> Weights:
    return _adamw(side)


@case()
def adamw_foreach(side: Side) -> Weights:
    return _adamw(side, foreach=True)


@case()
def adamw_fused(side: Side) -> Weights:
    return _adamw(side, fused=True)


@case("sgd", name="lbfgs_none", rtol=1e-3, atol=1e-4)
@case("agd", name="lbfgs_backward", rtol=1e-3, atol=1e-4)
def lbfgs(side: Side) -> Weights:
    model = mlp(side.rank)
    # No stopping by the loss, which is each rank's own.
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, tolerance_change=0)
    calls = 0
    with side.train(model, optimizer) as run:
        for x, y in run.data(batches(side.rank, 5)):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                value = F.cross_entropy(run.model(x), y)
                value.backward()
                return value

            optimizer.step(closure)
    assert calls == 20, calls
    return weights(model)


# --- models ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.body(self.embedding(x))))
        return y


@case()
def weight_tying(side: Side) -> Weights:
    torch.manual_seed(side.rank)
    model = Tied()
    data = [(y, y.flip(0)) for _, y in batches(side.rank)]
    result = fit(side, model, sgd(model), data=data)
    assert model.head.weight is model.embedding.weight
    return result


class Branching(nn.Module):
    """`never` is used on no rank, `rarely` on one, `sometimes` by all in every other step, `twice` twice."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0
        self.enter = nn.Linear(8, 8)
        self.never, self.rarely, self.sometimes, self.twice = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        if self.rank == 1:
            x = x + self.rarely(x)
        if self.calls % 2:
            x = x + self.sometimes(x)
        self.calls += 1
        y: Tensor = self.head(self.twice(torch.tanh(self.twice(x))))
        return y


@case("sgd", name="unused_none")
@case("agd", name="unused_backward_layers")
@case("agd", "gradients.0.segments=model", name="unused_backward_model")
def unused(side: Side) -> Weights:
    torch.manual_seed(side.rank)
    model = Branching(side.rank)
    before = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    with side.train(model, optimizer, find_unused_parameters=True) as run:
        before = model.never.weight.clone()
        for step, (x, y) in enumerate(run.data(batches(side.rank))):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            assert model.never.weight.grad is None
            assert model.rarely.weight.grad is not None
            assert (model.sometimes.weight.grad is None) == (step % 2 == 0)
            optimizer.step()
    assert torch.equal(model.never.weight, before), "an unused parameter was decayed"
    return weights(model)


@case()
def unused_zero_grad_to_zero(side: Side) -> Weights:
    torch.manual_seed(side.rank)
    model = Branching(side.rank)
    return fit(side, model, sgd(model, momentum=0.9), set_to_none=False, find_unused_parameters=True)


@case()
def frozen(side: Side) -> Weights:
    model = mlp(side.rank)
    model.get_submodule("2").requires_grad_(False)
    return fit(side, model, sgd(model, weight_decay=0.01))


class Convolutional(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.conv2(torch.relu(self.norm(self.conv(x))))).flatten(1))
        return y


def images(rank: int) -> Batches:
    generator = torch.Generator().manual_seed(200 + rank)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(STEPS)
    ]


@case()
def channels_last(side: Side) -> Weights:
    torch.manual_seed(side.rank)
    model = Convolutional()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's, left out
    optimizer = sgd(model)
    with side.train(model, optimizer, gradient_as_bucket_view=True) as run:
        for x, y in run.data(images(side.rank)):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x.contiguous(memory_format=torch.channels_last)), y).backward()
            if side.is_session:
                for tensor in (model.conv2.weight, model.conv2.weight.grad):
                    assert tensor is not None
                    assert tensor.is_contiguous(memory_format=torch.channels_last)
            optimizer.step()
    return weights(model)


@case()
def batch_norm(side: Side) -> Weights:
    """Parameters as with DDP that keeps each rank's statistics; the consensus has the mean of these."""
    torch.manual_seed(side.rank)
    model = Convolutional(norm=True)
    optimizer = sgd(model)
    with side.train(model, optimizer, broadcast_buffers=False) as run:
        for x, y in run.data(images(side.rank)):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            optimizer.step()
        if run.session is not None:
            run.session.consensus()
    statistics = torch.cat([model.get_buffer("norm.running_mean"), model.get_buffer("norm.running_var")])
    if not side.is_session:
        torch.distributed.all_reduce(statistics)
        statistics /= RANKS
    return {**weights(model), "statistics": statistics}


@case()
def dropout(side: Side) -> Weights:
    torch.manual_seed(side.rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    optimizer = sgd(model)
    with side.train(model, optimizer) as run:
        torch.manual_seed(50 + side.rank)
        for x, y in run.data(batches(side.rank)):
            optimizer.zero_grad()
            F.cross_entropy(run.model(x), y).backward()
            optimizer.step()
    return weights(model)


# --- compiled --------------------------------------------------------------------------------------------


def _compiled(side: Side, backend: str) -> Weights:
    """Compile after attach; DDP runs uncompiled."""
    model = mlp(side.rank)
    optimizer = sgd(model)
    with side.train(model, optimizer) as run:
        call = torch.compile(model, backend=backend) if side.is_session else run.model
        for x, y in run.data(batches(side.rank)):
            optimizer.zero_grad()
            F.cross_entropy(call(x), y).backward()
            optimizer.step()
    return weights(model)


if IS_FULL:  # four ranks that import Dynamo; CI compiles in the idioms' programs

    @case("agd", name="compile_aot_eager_backward")
    def compile_aot_eager(side: Side) -> Weights:
        return _compiled(side, "aot_eager")

    @case("sgd")
    def compile_aot_eager_none(side: Side) -> Weights:
        return _compiled(side, "aot_eager")


if IS_FULL and shutil.which("g++"):  # a minute of compiling on four ranks

    @case()
    def compile_inductor(side: Side) -> Weights:
        return _compiled(side, "inductor")


# --- precisions ------------------------------------------------------------------------------------------


@case(rtol=1e-2, atol=1e-3)
def bf16_autocast(side: Side) -> Weights:
    model = mlp(side.rank)
    optimizer = sgd(model)
    with side.train(model, optimizer) as run:
        for x, y in run.data(batches(side.rank)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = F.cross_entropy(run.model(x), y)
            value.backward()
            optimizer.step()
    return weights(model)


@case(rtol=1e-12, atol=1e-14)
def float64(side: Side) -> Weights:
    model = mlp(side.rank, torch.float64)
    return fit(side, model, sgd(model), data=batches(side.rank, dtype=torch.float64))


@case()
def float32_and_float64(side: Side) -> Weights:
    """Two dtypes in one model: a segment has one."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8, dtype=torch.float64)
            self.third = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)).double()).float()))
            return y

    torch.manual_seed(side.rank)
    model = Mixed()
    return fit(side, model, sgd(model))


@case(rtol=5e-2, atol=2e-2)
def bfloat16(side: Side) -> Weights:
    model = mlp(side.rank, torch.bfloat16)
    return fit(side, model, sgd(model), data=batches(side.rank, dtype=torch.bfloat16))


@case(rtol=1e-2, atol=2e-3)
def float16(side: Side) -> Weights:
    model = mlp(side.rank, torch.float16)
    return fit(side, model, sgd(model), data=batches(side.rank, dtype=torch.float16))


@case(rtol=1e-1, atol=1e-2)
def bfloat16_mean(side: Side) -> Weights:
    """One mean of bfloat16 gradients: ours is the float64 mean, rounded once: nothing is closer."""
    model = mlp(side.rank, torch.bfloat16)
    optimizer = sgd(model)
    x, y = batches(side.rank, dtype=torch.bfloat16)[0]
    with side.train(model, optimizer) as run:
        F.cross_entropy(run.model(x), y).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if side.is_session:
            model.zero_grad()
            with run.accumulate():
                F.cross_entropy(run.model(x), y).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                exact = parameter.grad.double()
                torch.distributed.all_reduce(exact)
                assert torch.equal(gradients[name], (exact / RANKS).bfloat16()), name
    return gradients


# --- running and comparing -------------------------------------------------------------------------------


def compare(chosen: Case, rank: int, peer: Any) -> dict[str, Any]:
    """Run a case on both sides; return what is wrong with it on this rank, or nothing."""
    torch._dynamo.reset()
    expected = chosen.train(Side(rank, None))
    given = chosen.train(Side(rank, chosen.strategy))
    wrong = []
    if expected.keys() != given.keys():
        wrong.append(f"{sorted(given)} in place of {sorted(expected)}")
    worst = 0.0
    for name, value in expected.items():
        if not torch.isfinite(value).all():
            wrong.append(f"{name} is not finite with DDP")
        worst = max(worst, float((given[name].double() - value.double()).abs().max()))
        if not torch.allclose(given[name], value, rtol=chosen.rtol, atol=chosen.atol):
            wrong.append(f"{name} is off by {(given[name].double() - value.double()).abs().max():.2e}")
    told = peer.allgather_bytes(digest(given).encode())
    if len(set(told)) > 1:
        wrong.append(f"the ranks differ: {[t.decode()[:6] for t in told]}")
    return {"wrong": wrong, "worst": worst}


def digest(values: Weights) -> str:
    """Hash values bit for bit."""
    hashed = hashlib.sha1()
    for name in sorted(values):
        hashed.update(values[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def attempt(chosen: Case, rank: int, peer: Any) -> dict[str, Any]:
    try:
        return compare(chosen, rank, peer)
    except Exception:
        # Told, not raised, so that the cases after it run: every case ends with a call of all ranks.
        peer.allgather_bytes(b"")
        return {"wrong": [f"rank {rank}: {traceback.format_exc()}"], "worst": float("nan")}


def load() -> None:
    """Import what compiles once for all ranks."""
    import torch._dynamo
    import torch._functorch.aot_autograd  # noqa: F401


def main(store: str, results: str, names: list[str]) -> None:
    """Run all cases on this rank; rank 0 writes down what every rank found, after each case."""
    torch.set_num_threads(1)
    peer = hocket.join()
    peer.timeout_s = TIMEOUT_S
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=peer.rank,
        world_size=peer.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    told: dict[str, list[Any]] = {}
    for name in names or CASES:
        started_s = time.monotonic()
        mine = {**attempt(CASES[name], peer.rank, peer), "seconds": time.monotonic() - started_s}
        told[name] = gather(peer, mine)
        if peer.rank == 0:
            Path(results).write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    in_each_rank(load)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
