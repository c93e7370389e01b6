"""A run that was cut off and resumed gives, bit for bit, what one gives that was neither interrupted nor saved."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from training import Noisy, Stateful, Training, model_of, on_ranks

import hocket

RANKS = 2
#: In the first pass, at its last batch (5 in each), in the middle of the second.
STEPS = (2, 5, 8)


def sparse(**compressor: Any) -> dict[str, Any]:
    return {"gradients": [{"collective": "sparse_allreduce", "compressor": compressor}]}


RESIDUAL = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.1}}
LAYERS = "parameters.0.segments=layers"

STRATEGIES: dict[str, tuple[Any, ...]] = {
    "sgd": ("sgd",),
    "agd": ("agd", "gradients.0.segments={name: bytes, size_mb: 0.001, first_mb: 0.0002}"),
    "local": ("local",),
    "periodic_average": ("periodic_average", "parameters.0.every=3"),
    "dpsgd": ("dpsgd",),
    "exponential": ("dpsgd", "parameters.0.topology=exponential"),
    "forward": ("periodic_average", "parameters.0.every=1", "parameters.0.overlap=forward", LAYERS),
    "delayed": ("dpsgd", "parameters.0.delay=1", LAYERS),
    "delayed every 2": ("periodic_average", "parameters.0.every=2", "parameters.0.delay=1"),
    "push-sum": ("sgp", "parameters.0.topology=irregular_directed"),
    "push-sum, delayed": ("overlap_sgp", "parameters.0.topology=irregular_directed"),
    "residuals": (sparse(**RESIDUAL),),
    "momentum in the compressor": (sparse(name="momentum_correction", compressor=RESIDUAL),),
    "phases": ({**sparse(**RESIDUAL), "phases": {4: {"gradients": [{"collective": "allreduce"}]}}},),
    "stale gradients": ({**sparse(**RESIDUAL), "phases": {8: {"gradients": [{"collective": "allreduce"}]}}},),
}


def check(training: Training, folder: Path, ranks: int = RANKS, steps: tuple[int, ...] = STEPS) -> None:
    """Compare with a run that never heard of checkpoints, for each step that is saved."""
    expected = on_ranks(ranks, training)
    saved = on_ranks(ranks, training, save=(folder / "saved", steps))
    assert [r.bits() for r in saved] == [r.bits() for r in expected], "saving changed the numbers"
    for step in steps:
        on_ranks(ranks, training, save=(folder / f"cut {step}", [step]), stop=step)
        # What a resumed process starts with is overwritten: other seeds must change nothing.
        resumed = on_ranks(ranks, replace(training, seed=1000), load=folder / f"cut {step}")
        for given, wanted in zip(resumed, expected, strict=True):
            assert given.resumed is not None
            assert (given.resumed.step, given.resumed.exact) == (step, True)
            assert given.losses == {number: loss for number, loss in wanted.losses.items() if number > step}
            assert given.bits() == wanted.bits()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, tmp_path: Path) -> None:
    # Among two ranks push-sum's weights stay 1.
    check(Training(STRATEGIES[strategy]), tmp_path, ranks=3 if "push-sum" in strategy else RANKS)


@pytest.mark.parametrize("loader", ["workers=2", "generator", "stateful"])
def test_loaders(loader: str, tmp_path: Path) -> None:
    check(Training(("dpsgd",), loader), tmp_path, steps=(8,) if loader == "workers=2" else STEPS)


def test_adam(tmp_path: Path) -> None:
    check(Training(("agd",), optimizer="adam"), tmp_path, steps=(8,))


def test_replicas_that_begin_apart_stay_apart(tmp_path: Path) -> None:
    check(Training(("sgd",), initial="keep"), tmp_path, steps=(8,))


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        ("workers=0", (18, 7)),
        ("workers=0", (18, 0)),
        ("workers=0", (7, 18)),
        ("stateful", (18, 7)),
        ("stateful", (7, 18)),
    ],
)
def test_a_rank_that_is_out_of_data(samples: tuple[int, int], loader: str, tmp_path: Path) -> None:
    """Its last batch comes again, the same one, as batch norm sees it."""
    check(Training(("sgd",), loader, samples), tmp_path, steps=(2, 4, 7))


def test_one_rank(tmp_path: Path) -> None:
    check(Training(("sgd",)), tmp_path, ranks=1)


def test_twice(tmp_path: Path) -> None:
    """A resumed run is saved and resumed again, within the same pass."""
    training = Training(("dpsgd",))
    expected = on_ranks(RANKS, training)
    on_ranks(RANKS, training, save=(tmp_path, [6]), stop=6)
    on_ranks(RANKS, training, load=tmp_path, save=(tmp_path, [8]), stop=9)
    resumed = on_ranks(RANKS, training, load=tmp_path)
    assert all(r.resumed is not None and r.resumed.step == 8 for r in resumed)
    assert [r.bits() for r in resumed] == [r.bits() for r in expected]


def test_a_step_that_a_scaler_leaves_out(tmp_path: Path) -> None:
    """Saved right after it, before the next batch has ended the step: neighbours still exchange, and once."""

    def run(rank: int, cut: bool, load: bool) -> tuple[int, list[Tensor]]:
        model = model_of()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        torch.manual_seed(rank)
        loader = DataLoader(Noisy(rank, 16), 4, shuffle=True)
        with hocket.attach(model, optimizer, "dpsgd", initial="keep") as session:
            first = session.load(tmp_path).step if load else 0
            for number, (x, y) in enumerate(session.data(loader), first):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if number != 1:
                    optimizer.step()
                elif cut:
                    session.save(tmp_path)
                    return session.step, []
        return session.step, [value.clone() for value in model.state_dict().values()]

    def on_two(cut: bool, load: bool) -> list[tuple[int, list[Tensor]]]:
        return hocket.virtual(2).run(lambda: run(hocket.join().rank, cut, load))

    expected = on_two(False, False)
    assert [steps for steps, _ in on_two(True, False)] == [2, 2]
    for given, wanted in zip(on_two(False, True), expected, strict=True):
        assert given[0] == wanted[0] == 4
        assert all(map(torch.equal, given[1], wanted[1]))


class _WithWorkers(Stateful):
    num_workers = 2


@pytest.mark.parametrize("kind", [Stateful, _WithWorkers])
def test_what_workers_of_a_stateful_loader_draw_is_said_to_differ(
    kind: type[Stateful], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int) -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "local") as session:
            session.load(tmp_path, missing="start")
            for x, _ in session.data(kind(Noisy(rank, 8), 4)):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                if session.step == 1:
                    session.save(tmp_path)

    with caplog.at_level(logging.WARNING, "hocket"):
        for _ in range(2):
            hocket.virtual(2).run(lambda: run(hocket.join().rank))
    told = [message for message in caplog.messages if "lacks its workers' random state" in message]
    assert len(told) == (kind is _WithWorkers)
