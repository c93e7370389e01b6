"""Parameter exchanges that are hidden: forward gives the numbers of none, a delay those of its formula."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import batches, flat, mlp, on_ranks, sgd, step_with, train

import hocket
from hocket.errors import NonFiniteError
from hocket.session.exchange import parameters

RANKS, STEPS = 3, 6


class Tied(nn.Module):
    """The first layer's weight is read again, outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.own = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x * self.own, self.first.weight))
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


class Attention(nn.Module):
    """Reads the weights of its output projection outside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)[:, None]
        y: Tensor = self.head(self.attention(x, x, x)[0][:, 0])
        return y


def trained(make: Callable[[], nn.Module], hidden: str, every: int) -> list[Tensor]:
    overrides = (
        f"parameters.0.{hidden}",
        f"parameters.0.every={every}",
        "parameters.0.segments=layers",
    )

    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = make().double()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose("periodic_average", *overrides)) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, STEPS))):
                if number == 4 and rank == 1:
                    continue
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return flat(model)

    return on_ranks(RANKS, run)


@pytest.mark.one_of_each
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("make", [mlp, Tied, Attention])
def test_forward_changes_no_bit(make: Callable[[], nn.Module], every: int) -> None:
    expected = trained(make, "overlap=none", every)
    assert all(
        torch.equal(one, other)
        for one, other in zip(trained(make, "overlap=forward", every), expected, strict=True)
    )


def test_a_step_without_a_forward_before_it_loses_nothing() -> None:
    def run(overlap: str) -> list[Tensor]:
        strategy = {"collective": "gossip", "topology": "ring", "segments": "layers", "overlap": overlap}

        def of_rank(rank: int) -> Tensor:
            torch.manual_seed(rank)
            model = mlp()
            optimizer = sgd(model)
            with hocket.attach(model, optimizer, {"parameters": [strategy]}, initial="keep") as session:
                for x, y in session.data(batches(rank, STEPS)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.step()
            return flat(model)

        return on_ranks(RANKS, of_rank)

    for own, expected in zip(run("forward"), run("none"), strict=True):
        assert torch.equal(own, expected)


class AttentionTied(nn.Module):
    """Attention, and an embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.embedding = nn.Embedding(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)[:, None] + self.embedding(x.argmax(1, keepdim=True) % 3)
        y: Tensor = self.head(self.attention(entered, entered, entered)[0][:, 0])
        return y


def test_forward_with_tied_weights_attention_and_an_ema() -> None:
    """An EMA that is updated after `settle` holds the same bits, too."""

    def run(overlap: str) -> list[tuple[Tensor, Tensor]]:
        strategy = {"collective": "gossip", "topology": "ring", "segments": "layers", "overlap": overlap}

        def of_rank(rank: int) -> tuple[Tensor, Tensor]:
            torch.manual_seed(rank)
            model = AttentionTied().double()
            optimizer = sgd(model)
            with hocket.attach(model, optimizer, {"parameters": [strategy]}, initial="keep") as session:
                average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
                for x, y in session.data(batches(rank, STEPS)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    session.settle()
                    average.update_parameters(model)
                    average(x)
            return flat(model), flat(average)

        return on_ranks(RANKS, of_rank)

    for (model, average), (expected, expected_average) in zip(run("forward"), run("none"), strict=True):
        assert torch.equal(model, expected)
        assert torch.equal(average, expected_average)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_delayed_adds_what_the_mean_differed_by(every: int) -> None:
    """After each step x += mean of what all sent one step ago - what this rank sent then."""
    models = [mlp() for _ in range(RANKS)]
    optimizers = [sgd(model) for model in models]
    sent: list[Tensor] = []

    def merge() -> None:
        for model, own in zip(models, list(sent), strict=False):
            nn.utils.vector_to_parameters(flat(model) + torch.stack(sent).mean(0) - own, model.parameters())
        sent.clear()

    for number, of_ranks in enumerate(zip(*(batches(r, STEPS) for r in range(RANKS)), strict=True), start=1):
        for model, optimizer, batch in zip(models, optimizers, of_ranks, strict=True):
            step_with(model, optimizer, [(batch, 1.0)])
        if sent:
            merge()
        if number % every == 0:
            sent[:] = [flat(model) for model in models]
    if sent:
        merge()
    strategy = ("periodic_average", f"parameters.0.every={every}", "parameters.0.delay=1")
    for given, model in zip(
        on_ranks(RANKS, lambda rank: train(strategy, batches(rank, STEPS))), models, strict=True
    ):
        torch.testing.assert_close(given, flat(model), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("every", [1, 2])
def test_delayed_merges_in_one_pass_with_the_bits_of_five(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for smallest in (0, 1 << 30):
        monkeypatch.setattr(parameters, "_SMALLEST_FUSED", smallest)
        results.append(trained(mlp, "delay=1", every))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_delayed_names_a_nan_that_one_pass_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_SMALLEST_FUSED", 0)

    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = mlp()
        optimizer = sgd(model)
        strategy = hocket.compose("periodic_average", "parameters.0.delay=1", "parameters.0.every=1")
        with hocket.attach(model, optimizer, strategy):
            for step in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.nan if step == 2 else 0.1)
                optimizer.step()

    with pytest.raises(NonFiniteError, match="is NaN or Inf after step 3"):
        on_ranks(2, run)


def test_copies_read_and_keep_their_own() -> None:
    """A forward of a deep copy merges nothing, and what is merged later does not reach it."""

    def run(rank: int) -> None:
        model = mlp(rank)
        optimizer = sgd(model)
        strategy = hocket.compose(
            "periodic_average",
            "parameters.0.every=1",
            "parameters.0.overlap=forward",
            "parameters.0.segments=layers",
        )
        with hocket.attach(model, optimizer, strategy, initial="keep") as session:
            for x, y in session.data(batches(rank, 2)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                own = flat(model)
                twin = copy.deepcopy(model)
                twin(x)
                assert torch.equal(flat(twin), own)
                assert torch.equal(flat(model), own), "the copy's forward merged into the model"
                model(x)
                assert not torch.equal(flat(model), own)
                assert torch.equal(flat(twin), own)

    on_ranks(2, run)


def test_state_dict_needs_no_other_rank_and_is_merged_once_settled() -> None:
    def run(rank: int) -> Tensor:
        model = mlp(rank)
        optimizer = sgd(model)
        strategy = hocket.compose("periodic_average", "parameters.0.every=1", "parameters.0.overlap=forward")
        with hocket.attach(model, optimizer, strategy, initial="keep") as session:
            for x, y in session.data(batches(rank, 1)):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if rank == 0:
                    own = model.state_dict()
                    assert all(torch.equal(own[name], p) for name, p in model.named_parameters())
                session.gather("rank 0 has saved")
                session.settle()
                return torch.cat([value.reshape(-1).clone() for value in model.state_dict().values()])
        raise AssertionError

    first, second = on_ranks(2, run)
    assert torch.equal(first, second)
