"""Another number of ranks goes on from the replicas' mean: parameters, buffers, and what an optimizer keeps of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Training, on_ranks

import hocket

TRAINING = Training(("dpsgd",), epochs=2)


def mean(tensors: list[Tensor]) -> Tensor:
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


@pytest.mark.one_of_each
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_starts_from_the_mean(
    ranks: int, optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(("dpsgd",), epochs=2, optimizer=optimizer, initial="keep")
    saved = on_ranks(2, training, save=(tmp_path, [3]), stop=3)
    # With a learning rate of 0 all but batch norm's statistics would stand still; so ask right after loading.
    loaded = on_ranks(ranks, Training(("dpsgd",), epochs=0, optimizer=optimizer, seed=5), load=tmp_path)
    for result in loaded:
        assert result.resumed is not None
        assert (result.resumed.step, result.resumed.epoch, result.resumed.exact) == (3, 0, False)
        for name, value in result.state.items():
            assert torch.equal(value, mean([of_rank.state[name] for of_rank in saved]))
        for position, value in enumerate(result.momenta):
            assert torch.equal(value, mean([of_rank.momenta[position] for of_rank in saved]))
    [message] = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        rf"{tmp_path}/step-00000003 was saved by 2 ranks, but {ranks} ranks run\. Check schedulers and everything else "
        r"that counts steps: .* Training continues from the replicas' mean, with the mean of the optimizer's state\. "
        r".* The state of exchanges is dropped",
        message,
    )


def test_equal_replicas_keep_their_bits(tmp_path: Path) -> None:
    saved = on_ranks(3, Training(("agd",)), save=(tmp_path, [3]), stop=3)
    [loaded] = on_ranks(1, Training(("agd",), epochs=0), load=tmp_path)
    trained = [name for name in loaded.state if "running" not in name]
    assert all(torch.equal(loaded.state[name], saved[0].state[name]) for name in trained)


@pytest.mark.one_of_each
@pytest.mark.parametrize("hidden", [{"overlap": "none"}, {"overlap": "forward"}, {"delay": 1}])
@pytest.mark.parametrize(
    ("segments", "dtype", "tolerance"),
    [
        ("model", torch.float64, 1e-12),
        ("layers", torch.float64, 1e-12),
        ("layers", torch.bfloat16, 2**-7),  # to the rounding of what is half-way
    ],
)
def test_push_sum_goes_on_from_its_mean(
    segments: str, dtype: torch.dtype, tolerance: float, hidden: dict[str, Any], tmp_path: Path
) -> None:
    """Values are divided by weights that differ: their mean is the consensus, which weighs them."""
    push_sum = {"name": "gossip", "push_sum": True}
    exchange = {
        "collective": push_sum,
        "topology": "irregular_directed",
        "segments": segments,
        **hidden,
    }

    def attached() -> tuple[nn.Module, hocket.Session]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, hocket.attach(
            model, optimizer, hocket.compose({"strategy": {"parameters": [exchange]}})
        )

    def parameters(model: nn.Module) -> Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def saved() -> tuple[Tensor, Tensor]:
        model, session = attached()
        with session:
            for _ in range(5):
                session.optimizer.zero_grad()
                model(torch.ones(1, 4, dtype=dtype) * session.rank).square().sum().backward()
                session.optimizer.step()
            session.save(tmp_path)
            own = parameters(model)
            with session.consensus():
                return own, parameters(model)

    def loaded() -> Tensor:
        model, session = attached()
        with session:
            session.load(tmp_path)
            return parameters(model)

    before = hocket.virtual(4).run(saved)
    _, expected = before[0]
    plain = torch.stack([own for own, _ in before]).mean(0)
    assert (plain - expected).abs().max() > 1e-4
    for size in (1, 3):
        for given in hocket.virtual(size).run(loaded):
            torch.testing.assert_close(given, expected, rtol=tolerance, atol=0)


def test_it_trains_on(tmp_path: Path) -> None:
    """The pass that was under way begins again; steps and passes are counted on, on all ranks alike."""
    on_ranks(2, TRAINING, save=(tmp_path, [7]), stop=7)
    for result in on_ranks(3, TRAINING, load=tmp_path):
        assert list(result.losses) == [8, 9, 10, 11, 12]


def test_optimizers_that_differ_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank without data makes no step of its own here, so its optimizer has no momentum to average."""
    on_ranks(2, Training(("local",), samples=(18, 0)), save=(tmp_path, [2]), stop=2)
    [loaded] = on_ranks(1, Training(("local",), epochs=0), load=tmp_path)
    assert loaded.momenta == []
    [message] = [record.getMessage() for record in caplog.records]
    assert (
        "without the optimizer's state (its structure differs between rank-0000.safetensors and rank-0001"
        in message
    )
