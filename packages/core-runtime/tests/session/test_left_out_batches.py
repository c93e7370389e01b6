"""A batch that a rank leaves out of an accumulation: it counts nothing, and steps stay where they are on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_branches import BRANCHES, EXCHANGED, LOCAL, composed
from torch import Tensor
from toys import batches, flat, mlp, on_ranks, sgd

import hocket

Skips = Collection[tuple[int, int]]

#: (rank, batch) of accumulations of 3, of which 4 follow each other: in the first and in later ones, each place.
SKIPS: dict[str, Skips] = {
    "none": (),
    "first": {(1, 0)},
    "middle": {(1, 1)},
    "last": {(1, 2)},
    "of a later one": {(1, 3), (0, 7)},
    "several": {(1, 0), (1, 2), (0, 4), (0, 5)},
    "all of one": {(0, 3), (0, 4), (0, 5)},
    "on all ranks": {(0, 1), (1, 1)},
    "on all ranks at the end": {(0, 11), (1, 11)},
}


def train(
    rank: int, strategy: hocket.Strategy, length: int, skips: Skips, number_of: int = 3, weight: Any = None
) -> tuple[torch.Tensor, int]:
    model = mlp()
    optimizer = sgd(model)
    with hocket.attach(model, optimizer, strategy) as session:
        for number, (x, y) in enumerate(session.data(batches(rank, length), weight=weight)):
            if (rank, number) in skips:
                continue
            loss = F.cross_entropy(model(x), y) / number_of
            if (number + 1) % number_of:
                with session.accumulate():
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        session.consensus()
        return flat(model), session.step


def one_process(ranks: Sequence[int], length: int, skips: Skips, number_of: int = 3) -> torch.Tensor:
    """Step with the mean of what the ranks' micro-batches give that were not left out."""
    model = mlp()
    optimizer = sgd(model)
    data = {rank: batches(rank, length) for rank in ranks}
    used: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(length):
        used += [data[rank][number] for rank in ranks if (rank, number) not in skips]
        if (number + 1) % number_of == 0 and any((rank, number) not in skips for rank in ranks):
            optimizer.zero_grad()
            for x, y in used:
                (F.cross_entropy(model(x), y) / len(used)).backward()
            optimizer.step()
            used = []
    return flat(model)


@pytest.mark.one_of_each
@pytest.mark.parametrize("where", SKIPS)
@pytest.mark.parametrize("branch", EXCHANGED)
def test_where_gradients_are_exchanged_it_is_one_process_without_it(branch: str, where: str) -> None:
    ranks = on_ranks(2, lambda rank: train(rank, composed(branch), 12, SKIPS[where]))
    expected = one_process((0, 1), 12, SKIPS[where])
    for parameters, steps in ranks:
        torch.testing.assert_close(parameters, expected)
        assert steps == (3 if where == "on all ranks at the end" else 4)


def local_reference(rank: int, length: int, skips: Skips) -> torch.Tensor:
    """A rank alone: the sum of its own micro-batches, each divided by 3, and no step where there is none."""
    model = mlp()
    optimizer = sgd(model)
    for number, (x, y) in enumerate(batches(rank, length)):
        if (rank, number) not in skips:
            (F.cross_entropy(model(x), y) / 3).backward()
        if (number + 1) % 3 == 0 and any(p.grad is not None for p in model.parameters()):
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


@pytest.mark.one_of_each
@pytest.mark.parametrize("where", [where for where in SKIPS if "on all ranks at" not in where])
@pytest.mark.parametrize("branch", LOCAL)
def test_where_gradients_stay_local_each_rank_steps_as_often(branch: str, where: str) -> None:
    if branch == "local" and where in ("first", "last", "several", "all of one"):
        pytest.skip("nobody tells a rank alone where the others' steps end")
    ranks = on_ranks(2, lambda rank: train(rank, composed(branch), 12, SKIPS[where]))
    assert [steps for _, steps in ranks] == [4, 4]
    if branch == "local":
        expected = (local_reference(0, 12, SKIPS[where]) + local_reference(1, 12, SKIPS[where])) / 2
        for parameters, _ in ranks:
            torch.testing.assert_close(parameters, expected)
    elif branch == "average":
        for parameters, _ in ranks:
            assert parameters.isfinite().all()


@pytest.mark.parametrize("where", ["first", "middle", "last", "of a later one", "several"])
def test_an_average_after_the_last_step_is_that_of_replicas_alone(where: str) -> None:
    # Rank 1 applies what it has accumulated where it left out the batch that ends the step.
    strategy = hocket.compose("periodic_average", "parameters.0.every=4")
    ranks = on_ranks(2, lambda rank: train(rank, strategy, 12, SKIPS[where]))
    expected = (local_reference(0, 12, SKIPS[where]) + local_reference(1, 12, SKIPS[where])) / 2
    for parameters, steps in ranks:
        assert steps == 4
        torch.testing.assert_close(parameters, expected)


@pytest.mark.one_of_each
@pytest.mark.parametrize("where", ["first", "middle", "last", "several"])
@pytest.mark.parametrize("branch", ["whole", "gossip", "average"])
def test_a_skip_in_each_of_two_passes_and_with_uneven_data(branch: str, where: str) -> None:
    def run(rank: int) -> tuple[torch.Tensor, int]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, composed(branch)) as session:
            for _ in range(2):
                for number, (x, y) in enumerate(session.data(batches(rank, 6 - 2 * rank))):
                    if (rank, number) in SKIPS[where]:
                        continue
                    loss = F.cross_entropy(model(x), y) / 3
                    if (number + 1) % 3:
                        with session.accumulate():
                            loss.backward()
                    else:
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
            session.consensus()
            return flat(model), session.step

    (one, steps), (other, others) = on_ranks(2, run)
    assert steps == others == 4
    torch.testing.assert_close(one, other)


@pytest.mark.one_of_each
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("skips", [{(1, 0), (0, 3)}, {(0, 0), (1, 0), (0, 4), (1, 4)}])
def test_without_accumulation_a_batch_that_is_left_out_is_a_step(
    branch: str, size: int, skips: Skips
) -> None:
    # Also where all ranks leave it out; then nothing is applied, be it momentum or decay.
    ranks = on_ranks(size, lambda rank: train(rank, composed(branch), 6, skips, number_of=1))
    assert [steps for _, steps in ranks] == [6] * size
    if branch in EXCHANGED or (size == 1 and branch != "outer"):
        expected = one_process(range(size), 6, skips, number_of=1)
    elif branch == "local":
        expected = torch.stack([one_process((r,), 6, skips, number_of=1) for r in range(size)]).mean(0)
    else:
        return
    for parameters, _ in ranks:
        torch.testing.assert_close(parameters, expected)


@pytest.mark.parametrize("branch", EXCHANGED)
@pytest.mark.parametrize("skips", [(), {(1, 1)}, {(0, 5), (1, 3)}])
def test_weights_within_an_accumulation_count_batch_by_batch(branch: str, skips: Skips) -> None:
    def weight(batch: Any) -> float:
        return float(batch[1].sum()) + 0.5

    ranks = on_ranks(2, lambda rank: train(rank, composed(branch), 9, skips, weight=weight))
    model = mlp()
    optimizer = sgd(model)
    data = {rank: batches(rank, 9) for rank in (0, 1)}
    for window in range(3):
        places = [(rank, 3 * window + n) for rank in (0, 1) for n in range(3)]
        used = [data[rank][number] for rank, number in places if (rank, number) not in skips]
        total = sum(map(weight, used))
        optimizer.zero_grad()
        for x, y in used:
            (F.cross_entropy(model(x), y) * (weight((x, y)) / total)).backward()
        optimizer.step()
    for parameters, _ in ranks:
        torch.testing.assert_close(parameters, flat(model))


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, lambda rank: train(rank, composed("whole"), 12, {(1, 1), (1, 4)}))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith(
        "rank 1 skipped a batch within an accumulation at step 0: the batch has weight 0"
    )


def test_an_accumulation_after_steps_of_one_batch_goes_on_without_a_batch() -> None:
    """Ranks no longer tell each other of each batch then."""

    def run(rank: int) -> tuple[int, Tensor]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 5))):
                if rank == 1 and number == 3:
                    continue
                with session.accumulate() if number in (2, 3) else nullcontext():
                    (F.cross_entropy(model(x), y) / (1 if number < 2 else 3)).backward()
                if number not in (2, 3):
                    optimizer.step()
                    optimizer.zero_grad()
            return session.step, flat(model)

    given = on_ranks(2, run)
    model = mlp()
    optimizer = sgd(model)
    data = [batches(rank, 5) for rank in range(2)]
    for counted in ([(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2), (0, 3), (0, 4), (1, 2), (1, 4)]):
        optimizer.zero_grad()
        for rank, number in counted:
            x, y = data[rank][number]
            (F.cross_entropy(model(x), y) / len(counted)).backward()
        optimizer.step()
    for steps, weights in given:
        assert steps == 3
        torch.testing.assert_close(weights, flat(model), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_a_batch_that_one_rank_leaves_out_is_no_difference_of_learning_rates(
    rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Where gradients stay local; rates that do differ are told."""

    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            optimizer.param_groups[0]["lr"] = rate if rank else 0.1
            for number, (x, y) in enumerate(session.data(batches(rank, 4))):
                if (rank, number) != (1, 2):
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            session.consensus()

    on_ranks(2, run)
    told = [line for line in caplog.messages if "optimizers differ" in line]
    assert len(told) == (rate != 0.1)
