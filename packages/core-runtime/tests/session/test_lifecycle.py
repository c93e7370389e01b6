"""Attaching, closing, attaching again; copies of the model; what the choice of overlap must not change."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, sgd, train

import hocket
from hocket.errors import AttachError, HocketError
from hocket.testing.session import inner_of

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


@pytest.mark.parametrize("segments", ["model", "layers", "{name: bytes, size_mb: 0.0001}"])
def test_overlap_changes_no_bit(segments: str) -> None:
    none = on_ranks(3, lambda rank: train(("sgd", f"gradients.0.segments={segments}"), batches(rank, 6)))
    backward = on_ranks(3, lambda rank: train(("agd", f"gradients.0.segments={segments}"), batches(rank, 6)))
    assert all(torch.equal(one, other) for one, other in zip(none, backward, strict=True))


@pytest.mark.parametrize("strategy", ["sgd", "agd", "local", "periodic_average"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_is_plain_torch(strategy: str, optimizer: str) -> None:
    """No transport, no change: bit for bit."""
    data = batches(0, 6, dtype=torch.float32)
    models = [mlp(0, torch.float32) for _ in range(2)]
    plain, attached = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    for x, y in data:
        plain.zero_grad()
        F.cross_entropy(models[0](x), y).backward()
        plain.step()
    with hocket.attach(models[1], attached, strategy) as session:
        for x, y in session.data(data):
            attached.zero_grad()
            F.cross_entropy(models[1](x), y).backward()
            attached.step()
        session.consensus()
        assert session.consensus_distance() == 0
        assert (session.rank, session.size, session.step) == (0, 1, 6)
        assert session.counters.exchanges == 0
    assert torch.equal(flat(models[0]), flat(models[1]))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_close_leaves_a_model_to_train_on() -> None:
    """After close each rank is on its own, with its gradients, its momentum and plain torch's numbers."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            steps(model, optimizer, session.data(batches(rank, 3)))
            exchanges = session.counters.exchanges
            gradients = [p.grad for p in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            assert gradient is not None
            assert torch.equal(parameter.grad, gradient)
            assert parameter.grad.data_ptr() != gradient.data_ptr(), "still a part of the segment"
        twin = copy.deepcopy(model)
        twin_optimizer = sgd(twin)
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(model, optimizer, batches(rank + 10, 3))
        steps(twin, twin_optimizer, batches(rank + 10, 3))
        assert session.counters.exchanges == exchanges
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        return flat(model), flat(twin)

    told = on_ranks(2, run)
    assert all(torch.equal(*pair) for pair in told)
    assert not torch.equal(told[0][0], told[1][0])


def test_attach_again_goes_on() -> None:
    """Two sessions one after the other are one; an epoch each, another strategy for the second."""

    def twice(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        for strategy in ("agd", "sgd"):
            with hocket.attach(model, optimizer, strategy) as session:
                steps(model, optimizer, session.data(batches(rank, 3)))
        return flat(model)

    def once(rank: int) -> Tensor:
        return train(("sgd",), batches(rank, 3) * 2)

    for one, other in zip(on_ranks(3, twice), on_ranks(3, once), strict=True):
        assert torch.equal(one, other)


def test_close_twice_and_enter_after_close() -> None:
    def run(_: int) -> None:
        model = mlp()
        session = hocket.attach(model, sgd(model), "agd")
        session.close()
        session.close()
        with pytest.raises(HocketError, match="closed: attach again"), session:
            pass

    on_ranks(2, run)


def test_an_error_in_the_loop_takes_the_hooks_off_and_is_not_hidden() -> None:
    def run(_: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with pytest.raises(ZeroDivisionError), hocket.attach(model, optimizer, "agd"):
            raise ZeroDivisionError
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not optimizer._optimizer_step_pre_hooks

    on_ranks(2, run)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded]
)
def test_copies_of_the_model_are_on_their_own(duplicate: Any) -> None:
    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            for x, y in session.data(batches(rank, 3)):
                if rank == 0:
                    twin = duplicate(model)
                    assert torch.equal(flat(twin), flat(model))
                    F.cross_entropy(twin(x), y).backward()
                    with torch.no_grad():
                        for parameter in twin.parameters():
                            parameter.zero_()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return flat(model)

    expected = on_ranks(2, lambda rank: train(("agd",), batches(rank, 3)))
    assert all(torch.equal(one, other) for one, other in zip(on_ranks(2, run), expected, strict=True))


def test_state_dict_loads_in_place() -> None:
    def run(_: int) -> None:
        model = mlp(0)
        with hocket.attach(model, sgd(model), "agd") as session:
            model.load_state_dict(mlp(5).state_dict())
            assert torch.equal(
                inner_of(session).storage.flats[0][:35].view(7, 5), mlp(5).get_parameter("0.weight")
            )

    on_ranks(2, run)


@pytest.mark.parametrize("option", ["initial", "on_nonfinite"])
def test_options_are_checked(option: str) -> None:
    model = mlp()
    options: dict[str, Any] = {option: "typo"}
    with pytest.raises(AttachError, match=rf"{option}='typo' is not allowed; allowed: '\w+' or '\w+'"):
        hocket.attach(model, sgd(model), "sgd", **options)


def test_counters() -> None:
    """Each rank sends 2 (p - 1) / p of what it contributes, in each segment of each step."""

    def run(rank: int) -> tuple[float, int]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose("agd", "gradients.0.segments=layers")) as session:
            steps(model, optimizer, session.data(batches(rank, 3)))
            return session.counters.bytes_sent, session.counters.exchanges

    # Two layers; (40 + 8, 24 + 8) elements with padding, and 2 + 2 trailing numbers in each; 8 bytes each.
    for bytes_sent, exchanges in on_ranks(4, run):
        assert exchanges == 3 * 2
        assert bytes_sent == 3 * 2 * 3 / 4 * 8 * (40 + 8 + 4 + 24 + 8 + 4)
