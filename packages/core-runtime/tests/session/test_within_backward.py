"""An optimizer that steps within backward, and DistributedDataParallel around a session's model, are told at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # which torch exports
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # the backend `fake`
from toys import batches, flat, mlp, on_ranks, sgd, train

import hocket
from hocket.errors import AttachError, SessionError


def step_in_hooks(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Give each parameter an optimizer of its own, which steps as soon as its gradient is in."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


@pytest.mark.one_of_each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after", "torch's own", "not attached"])
@pytest.mark.parametrize("strategy", ["sgd", "agd", "dpsgd", "local"])
def test_a_step_within_backward(strategy: str, when: str) -> None:
    def run(rank: int) -> None:
        model = mlp()
        if when == "torch's own":
            from torch.distributed.optim import (  # type: ignore[attr-defined]
                _apply_optimizer_in_backward,
            )

            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            given = [p._in_backward_optimizers[0] for p in model.parameters()]  # type: ignore[attr-defined]
        elif when == "before":
            given = step_in_hooks(model)
        else:
            given = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        session = hocket.attach(model, given, strategy)
        if when == "not attached":
            step_in_hooks(model)
        elif when == "after":
            for optimizer in given:
                [parameter] = optimizer.param_groups[0]["params"]
                parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        before = flat(model)
        x, y = batches(rank, 1)[0]
        with pytest.raises(
            SessionError, match=r"SGD\.step\(\) was called within backward\(\).*step it after backward"
        ):
            F.cross_entropy(model(x), y).backward()
        assert torch.equal(flat(model), before)
        session.inner.abandon()

    on_ranks(2, run)


def test_other_models_may_step_within_backward() -> None:
    """A model that no session holds is its owner's business, also while a session is open."""

    def run(rank: int) -> Tensor:
        other = mlp()
        step_in_hooks(other)
        start = flat(other)
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd"):
            for x, y in batches(rank, 2):
                F.cross_entropy(other(x), y).backward()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert not torch.equal(flat(other), start)
        return flat(model)

    expected = on_ranks(2, lambda rank: train(("sgd",), batches(rank, 2)))
    assert all(map(torch.equal, on_ranks(2, run), expected))


@pytest.fixture(params=[1, 2, 4])
def group_size(request: pytest.FixtureRequest) -> Iterator[int]:
    # No Gloo: see test_refusals.py.
    distributed.init_process_group("fake", store=HashStore(), rank=0, world_size=request.param)
    yield request.param
    distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["sgd", "periodic_average"])
def test_ddp_around_the_model(strategy: str, group_size: int) -> None:
    """Over as many ranks as the session has, or more, both would average; over one it averages nothing."""

    def run(rank: int) -> None:
        model = mlp()
        wrapped = DistributedDataParallel(model)
        optimizer = sgd(model)
        x, y = batches(rank, 1)[0]
        with hocket.attach(wrapped.module, optimizer, strategy) as session:
            F.cross_entropy(model(x), y).backward()  # by itself, it is as good as any
            optimizer.step()
            with torch.no_grad():
                wrapped(x)
            with wrapped.no_sync(), session.accumulate():
                F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if group_size > 1:
                with pytest.raises(SessionError, match=r"at step 2, in addition to .* Call the plain model"):
                    wrapped(x)
            else:
                wrapped(x)
        wrapped(x)

    on_ranks(2, run)


def test_another_model_in_ddp_is_compiled_and_called() -> None:
    distributed.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    try:
        with hocket.attach(model := mlp(), sgd(model), "sgd", peer=hocket.join()):
            other = DistributedDataParallel(mlp())
            x = batches(0, 1)[0][0]
            assert torch.equal(torch.compile(other, backend="eager")(x), other(x))
    finally:
        distributed.destroy_process_group()


def test_ddp_within_groups_and_a_session_between() -> None:
    distributed.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    try:

        def run(rank: int) -> None:
            model = mlp()
            wrapped = DistributedDataParallel(model)
            x, _ = batches(rank, 1)[0]
            for strategy in ("periodic_average", "sgd"):
                with hocket.attach(model, sgd(model), strategy):
                    if strategy == "sgd":
                        with pytest.raises(
                            SessionError, match="DistributedDataParallel averages the model's gradients"
                        ):
                            wrapped(x)
                    else:
                        wrapped(x)

        on_ranks(4, run)
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [False, True])
def test_the_module_within_fsdp(original: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    distributed.init_process_group("fake", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=original)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with pytest.raises(AttachError, match="is sharded by FullyShardedDataParallel"):
            hocket.attach(wrapped.module, optimizer, "sgd")
    finally:
        distributed.destroy_process_group()
