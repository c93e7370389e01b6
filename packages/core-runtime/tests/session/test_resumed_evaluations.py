"""Evaluations through `session.data` beside checkpoints: no pass takes the place of another one."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toys import Batch, batches, flat, mlp, on_ranks, sgd

import hocket
from hocket.errors import UserError

PASSES, LENGTH = 2, 4
#: In the second pass.
SAVED = 6

#: As many as two ranks read in a pass, two at a time.
SAMPLES = TensorDataset(*map(torch.cat, zip(*batches(0, LENGTH), strict=True)))

Seen = list[float]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, seen: Seen) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    seen.append(float(batch[0].sum()))


def evaluated(session: hocket.Session, rank: int, how: str) -> Seen:
    """Read as many batches as no training has, with a model that is evaluated."""
    seen = []
    session.model.train(how != "eval mode")
    with torch.no_grad() if how == "no gradients" else contextlib.nullcontext():
        for x, _ in session.data(batches(rank + 9, 5)):
            session.model(x)
            seen.append(float(x.sum()))
    session.model.train()
    return seen


@pytest.mark.parametrize("how", ["eval mode", "no gradients", "none, and training is in eval mode"])
def test_a_resumed_pass_is_not_taken_by_an_evaluation_before_it(how: str, tmp_path: Path) -> None:
    evaluates = how in ("eval mode", "no gradients")

    def run(rank: int, *, resume: bool) -> tuple[Tensor, Seen, Seen]:
        model, seen, read = mlp().train(evaluates), [], []  # type: ignore[var-annotated]
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            first = session.load(tmp_path).epoch if resume else 0
            if resume and evaluates:
                read = evaluated(session, rank, how)
            for _ in range(first, PASSES):
                for batch in session.data(batches(rank, LENGTH)):
                    trained(model, optimizer, batch, seen)
                    if session.step == SAVED and not resume:
                        session.save(tmp_path)
        return flat(model), seen, read

    whole = on_ranks(2, partial(run, resume=False))
    for rank, (model, seen, read) in enumerate(on_ranks(2, partial(run, resume=True))):
        assert torch.equal(model, whole[rank][0])
        assert seen == whole[rank][1][SAVED:]
        assert len(read) == 5 * evaluates


@pytest.mark.parametrize("then", ["goes on", "trains"])
def test_a_save_within_an_evaluation_is_no_training(then: str, tmp_path: Path) -> None:
    def run(rank: int, *, resume: bool) -> tuple[Tensor, Seen, Seen]:
        model, seen, read = mlp(), [], []  # type: ignore[var-annotated]
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            first = session.load(tmp_path).epoch if resume else 0
            for number in range(first - (resume and then == "goes on"), PASSES):
                if not (resume and number < first):
                    model.train()
                    for batch in session.data(batches(rank, LENGTH)):
                        trained(model, optimizer, batch, seen)
                if not (resume and then == "trains"):
                    model.eval()
                    for x, _ in session.data(batches(rank + 9, 5)):
                        read.append(float(x.sum()))
                        model(x)
                        if number == 0 and len(read) == 2 and not resume:
                            session.save(tmp_path)
            assert (session.step, session.inner.epochs.ended) == (PASSES * LENGTH, PASSES)
        return flat(model), seen, read

    whole = on_ranks(2, partial(run, resume=False))
    for rank, (model, seen, read) in enumerate(on_ranks(2, partial(run, resume=True))):
        assert torch.equal(model, whole[rank][0])
        assert seen == whole[rank][1][LENGTH:]
        assert read == (whole[rank][2][2:] if then == "goes on" else [])


def test_a_loop_that_trains_and_was_taken_for_an_evaluation_is_an_error(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model = mlp()
        with hocket.attach(model, sgd(model), "sgd") as session:
            for batch in session.data(batches(rank, LENGTH)):
                trained(model, session.optimizer, batch, [])
                if session.step == 2:
                    session.save(tmp_path)

    def resume(rank: int) -> None:
        model = mlp()
        with hocket.attach(model, sgd(model), "sgd") as session:
            session.load(tmp_path)
            model.eval()
            for batch in session.data(batches(rank, LENGTH)):
                model.train()
                trained(model, session.optimizer, batch, [])

    on_ranks(2, save)
    with pytest.raises(UserError, match=r"call model\.train\(\) before the loop"):
        on_ranks(2, resume)


@pytest.mark.parametrize("strategy", ["sgd", "periodic_average"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("saved", [LENGTH, SAVED])
def test_a_look_at_the_first_batch_is_no_pass(saved: int, held: bool, strategy: str, tmp_path: Path) -> None:
    """Torch's tutorials read a batch's size so, in each epoch; resumed, they ended after half of their epochs."""

    def run(rank: int, *, resume: bool, looks: bool = True) -> tuple[Tensor, Seen, int]:
        model, seen, iterators = mlp(), [], []  # type: ignore[var-annotated]
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            data = session.data(hocket.loader(SAMPLES, 2))
            first = session.load(tmp_path).epoch if resume else 0
            for _ in range(first, PASSES):
                if looks:
                    iterators.append(iter(data))
                    next(iterators[-1])
                    if not held:
                        iterators.clear()
                for batch in data:
                    trained(model, optimizer, batch, seen)
                    if session.step == saved == SAVED and not resume and looks:
                        session.save(tmp_path)
                if session.step == saved == LENGTH and not resume and looks:
                    session.save(tmp_path)
            return flat(model), seen, session.inner.epochs.ended

    whole = on_ranks(2, partial(run, resume=False, looks=False))
    for resume in (False, True):
        for rank, (model, seen, ended) in enumerate(on_ranks(2, partial(run, resume=resume))):
            assert torch.equal(model, whole[rank][0])
            assert seen == whole[rank][1][saved * resume :]
            assert ended == PASSES


@pytest.mark.parametrize("looks", [False, True])
def test_a_pass_that_was_saved_at_its_last_batch_goes_on_without_batches(looks: bool, tmp_path: Path) -> None:
    """As torchdata's StatefulDataLoader does: a loop has no more of them, and a look at the first finds none."""

    def run(rank: int, *, resume: bool) -> tuple[Seen, list[int], int]:
        model, seen, lengths = mlp(), [], []  # type: ignore[var-annotated]
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            data = session.data(hocket.loader(SAMPLES, 2))
            first = session.load(tmp_path).epoch if resume else 0
            if resume and looks:
                with pytest.raises(StopIteration):
                    next(iter(data))
                first += 1
            for _ in range(first, PASSES):
                before = len(seen)
                for batch in data:
                    trained(model, optimizer, batch, seen)
                    if session.step == LENGTH and not resume:
                        session.save(tmp_path)
                lengths.append(len(seen) - before)
            return seen, lengths, session.inner.epochs.ended

    for (seen, *_), (after, lengths, ended) in zip(
        on_ranks(2, partial(run, resume=False)), on_ranks(2, partial(run, resume=True)), strict=True
    ):
        assert after == seen[LENGTH:]
        assert lengths == [*([] if looks else [0]), LENGTH]
        assert ended == PASSES


@pytest.mark.parametrize("used", ["accumulated", "stepped"])
def test_a_pass_that_is_left_after_its_first_batch_counts(used: str) -> None:
    def run(rank: int) -> int:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for batch in session.data(batches(rank, LENGTH)):
                with session.accumulate() if used == "accumulated" else contextlib.nullcontext():
                    F.cross_entropy(model(batch[0]), batch[1]).backward()
                if used == "stepped":
                    optimizer.step()
                break
            return session.inner.epochs.ended

    assert on_ranks(2, run) == [1, 1]
