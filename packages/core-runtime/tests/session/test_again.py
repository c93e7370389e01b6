"""Models that are attached again go on counting; what torch's checkpoints do to an optimizer is no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from toys import Batch, batches, flat, mlp, on_ranks, replicas, sgd

import hocket

RANKS = 2


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_goes_on_saving_where_it_saved(fails: bool, tmp_path: Path) -> None:
    def run(rank: int) -> list[int]:
        model = mlp()
        model[0].requires_grad_(False)
        optimizer, steps = sgd(model), []
        try:
            with hocket.attach(model, optimizer, "sgd") as session:
                for batch in session.data(batches(rank, 3)):
                    step(model, optimizer, batch)
                session.save(tmp_path)
                if fails:
                    raise KeyError
        except KeyError:
            pass
        model[0].requires_grad_(True)
        with hocket.attach(model, optimizer, "sgd") as session:
            steps += [session.step, session.inner.epochs.ended]
            step(model, optimizer, batches(rank, 1)[0])
            session.save(tmp_path)
            steps.append(session.step)
        other = mlp()
        with hocket.attach(other, sgd(other), "sgd") as session:
            steps.append(session.step)
        return steps

    assert on_ranks(RANKS, run) == [[3, 1, 4, 0]] * RANKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_periods_and_phases_go_on() -> None:
    """Averaged after steps 2 and 4 of five; with phases in every step from the third on."""

    def run(rank: int, strategy: hocket.Strategy) -> Tensor:
        model = mlp(rank)
        optimizer, data = sgd(model), batches(rank, 5)
        for part in (data[:1], data[1:4], data[4:]):
            with hocket.attach(model, optimizer, strategy, initial="keep"):
                for batch in part:
                    step(model, optimizer, batch)
        return flat(model)

    periods = hocket.compose("periodic_average", "parameters.0.every=2")
    expected = replicas([batches(rank, 5) for rank in range(RANKS)], 2, initial=range(RANKS))
    for got, mean in zip(on_ranks(RANKS, lambda rank: run(rank, periods)), expected, strict=True):
        torch.testing.assert_close(got, mean)
    averaged = {"parameters": [{"collective": "allreduce"}]}
    phases = hocket.compose({"recipe": "local", "phases": {2: averaged}})
    assert torch.equal(*on_ranks(RANKS, lambda rank: run(rank, phases)))


@pytest.mark.parametrize("asking", [(), (0,), (0, 1)])
def test_the_step_by_which_torch_makes_an_optimizers_state_is_none(asking: tuple[int, ...]) -> None:
    def run(rank: int) -> tuple[int, bool]:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            before = flat(model)
            if rank in asking:
                get_state_dict(model, optimizer)
            same = torch.equal(flat(model), before)
            for batch in batches(rank, 3):
                step(model, optimizer, batch)
            return session.step, same

    assert on_ranks(RANKS, run) == [(3, True)] * RANKS


#: Strategies in which ranks train alone for more than 3 steps.
ALONE: dict[str, Any] = {
    "local": "local",
    "average": "periodic_average",
    "outer": {"parameters": [{"collective": "allreduce", "every": 9, "outer": {"name": "sgd", "lr": 1.0}}]},
}


def _between(between: str, model: nn.Module, session: hocket.Session) -> None:
    if between == "mean":
        session.consensus()
    session.close()
    if between == "other weights":
        model.load_state_dict(mlp(7).state_dict())


@pytest.mark.parametrize("strategy", [*ALONE, "sgd"])
@pytest.mark.parametrize("between", ["nothing", "mean", "other weights"])
def test_replicas_that_rank_0s_replaces_are_missed(
    strategy: str, between: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank's training since the last exchange is lost, unless the replicas were set to their mean before."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        session = hocket.attach(model, sgd(model), ALONE.get(strategy, strategy))
        for batch in batches(rank, 3):
            step(model, session.inner.optimizer, batch)
        session.settle()
        own = flat(model)
        _between(between, model, session)
        with hocket.attach(model, sgd(model), ALONE.get(strategy, strategy)):
            return own, flat(model)

    (of_first, begun), (of_second, same) = on_ranks(RANKS, run)
    assert torch.equal(begun, same)
    differ = not torch.equal(of_first, of_second)
    assert differ == (strategy != "sgd")
    if between == "nothing":
        assert torch.equal(begun, of_first)
    elif between == "mean" and strategy != "outer":  # whose mean is that of step 0
        torch.testing.assert_close(begun, (of_first + of_second) / 2)
    warned = [line for line in caplog.messages if "go on from rank 0's" in line]
    assert len(warned) == (differ and between == "nothing")


def test_replicas_that_are_kept_are_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> bool:
        model = mlp()
        with hocket.attach(model, optimizer := sgd(model), "local"):
            step(model, optimizer, batches(rank, 1)[0])
        own = flat(model)
        with hocket.attach(model, sgd(model), "local", initial="keep"):
            return torch.equal(own, flat(model))

    assert on_ranks(RANKS, run) == [True] * RANKS
    assert not [line for line in caplog.messages if "rank 0's" in line]
