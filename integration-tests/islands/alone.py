"""FSDP2 with and without Hocket, bit for bit, where islands compute the same; and what a session leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hocket
from islands.cases import IS_FULL, OPTIMIZERS, Case, batch, full, make

CASE = Case(["sgd"], double=False)
STEPS = 4
STRATEGIES = ("agd", "periodic_average")


def main(folder: Path, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))["shard"]
    for number, (policy, build) in enumerate(POLICIES.items()):
        expected = trained(build(mesh), mesh, None)
        for strategy in STRATEGIES if IS_FULL else [STRATEGIES[number % 2]]:
            given = trained(build(mesh), mesh, strategy)
            assert all(torch.equal(given[name], expected[name]) for name in expected), f"{policy}, {strategy}"
    moved_memory(mesh)
    evaluated_before_a_step(mesh)
    for strategy, skipping in (("sgd", {0, 1, 2, 3}), ("diloco", {2, 3}), ("powersgd", {0, 1, 2, 3})):
        nan_in_one_shard(mesh, strategy, skipping)
    kept_gradients(mesh)
    hooks_set_later(mesh)


def sharded(mesh: Any, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = make(CASE, 0) if model is None else model
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def mixed(dtype: torch.dtype) -> Callable[[Any], nn.Module]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    return lambda mesh: sharded(mesh, mp_policy=policy)


def checkpointed(mesh: Any) -> nn.Module:
    model = make(CASE, 0)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    return sharded(mesh, model)


def prefetching(mesh: Any) -> nn.Module:
    model = sharded(mesh)
    model.set_modules_to_forward_prefetch(list(model.blocks))  # type: ignore[operator,arg-type]
    return model


def compiled(mesh: Any) -> nn.Module:
    model = make(CASE, 0)
    for block in model.blocks:
        block.compile(backend="eager")
    return sharded(mesh, model)


POLICIES: dict[str, Callable[[Any], nn.Module]] = {
    "mixed precision": mixed(torch.float32),
    "mixed precision, reduced in bfloat16": mixed(torch.bfloat16),
    "bfloat16": lambda mesh: sharded(mesh, make(CASE, 0).bfloat16()),
    "offloaded": lambda mesh: sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "checkpointed": checkpointed,
    "prefetching": prefetching,
    "compiled layers": compiled,
}


def trained(model: nn.Module, mesh: Any, strategy: str | None) -> dict[str, Tensor]:
    """Train on batches that all islands share, so that exchanges change no bit."""
    step = OPTIMIZERS["foreach"](list(model.parameters()))
    if strategy is None:
        loop(model, step, mesh)
        return full(model)
    every = ["parameters.0.every=2"] if strategy == "periodic_average" else []
    with hocket.attach(model, step, hocket.compose(strategy, *every)) as session:
        loop(model, step, mesh)
        assert session.consensus_distance() == 0.0
        return full(model)


def hooks_set_later(mesh: Any) -> None:
    """A program's hooks that are set after attach change gradients before they are exchanged."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def hooked(strategy: str | None) -> dict[str, Tensor]:
        model = sharded(mesh)
        optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
        session = None if strategy is None else hocket.attach(model, optimizer, strategy)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(halve)
        loop(model, optimizer, mesh)
        if session is not None:
            session.close()
        return full(model)

    given, expected = hooked("agd"), hooked(None)
    assert all(torch.equal(given[name], expected[name]) for name in expected)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    dtype = next(model.parameters()).dtype
    for number in range(STEPS):
        x, y = batch(CASE, number, mesh.get_local_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
        with torch.no_grad():
            model(x.to(dtype))  # leaves the root gathered, with what the next merge is about to change


def moved_memory(mesh: Any) -> None:
    """Uneven shards whose memory torch moves, as its version 2.7 does, train on from where they are then."""
    given, expected = (spread(mesh, moves) for moves in (True, False))
    assert all(torch.equal(given[name], expected[name]) for name in expected)


def evaluated_before_a_step(mesh: Any) -> None:
    """What an evaluation between backward and step has gathered is dropped before parameters are exchanged."""
    given, expected = (between(mesh, evaluates) for evaluates in (True, False))
    assert all(torch.equal(given[name], expected[name]) for name in expected)


def between(mesh: Any, evaluates: bool) -> dict[str, Tensor]:
    model = sharded(mesh)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    with hocket.attach(model, optimizer, "dpsgd") as session:
        for number in range(3):
            x, y = batch(CASE, number, session.data_rank)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if evaluates:
                with torch.no_grad():
                    model(x)
            optimizer.step()
        return full(model)


def nan_in_one_shard(mesh: Any, strategy: str, skipping: set[int]) -> None:
    """All ranks that step with a gradient of which one shard holds NaN leave its step out."""
    model: Any = sharded(mesh)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))

    def spoil(parameter: Any) -> None:
        if session.step == 1 and session.rank == 3:
            parameter.grad.to_local()[0] = torch.nan

    model.head.weight.register_post_accumulate_grad_hook(spoil)
    with hocket.attach(model, optimizer, strategy, on_nonfinite="skip") as session:
        for number in range(3):
            x, y = batch(CASE, number, session.data_rank)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert session.skipped_steps == (session.rank in skipping), strategy
    assert all(bool(value.isfinite().all()) for value in full(model).values())


def spread(mesh: Any, moves: bool) -> dict[str, Tensor]:
    model = sharded(mesh)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    strategy = hocket.compose("diloco", "parameters.0.every=2")
    with hocket.attach(model, optimizer, strategy) as session:
        for number in range(6):
            if moves and number in (1, 4):
                move(model)
            x, y = batch(CASE, number, session.data_rank)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with session.consensus():
            return full(model)


def move(model: Any) -> None:
    """Move all shards, and what FSDP gathers from."""
    for module in (model, *model.blocks):
        module.reshard()
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                data = parameter._sharded_param_data = parameter._sharded_param_data.clone()
                part = parameter.sharded_param._local_tensor
                parameter.sharded_param._local_tensor = data.as_strided(part.shape, part.stride())


def kept_gradients(mesh: Any) -> None:
    """A gradient that a program keeps stays as it is, and close gives parameters their gradients and no hooks."""
    model = sharded(mesh)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    session = hocket.attach(model, optimizer, "sgd")
    kept = []
    for number in range(3):
        x, y = batch(CASE, number, session.data_rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradient: Any = model.head.weight.grad  # type: ignore[union-attr]
        kept.append((gradient, gradient.full_tensor().clone()))
        optimizer.step()
    session.close()
    for gradient, value in kept:
        assert torch.equal(gradient.full_tensor(), value)
    before = full(model)
    loop(model, optimizer, mesh)
    assert not torch.equal(before["head.weight"], full(model)["head.weight"])
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
