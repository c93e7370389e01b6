"""Memory that the user holds stays the user's: weights set aside, gradients that are kept, models let go of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from toys import batches, flat, mlp, on_ranks, sgd

import hocket

LOOKS = ("consensus", "replica", "settle", "consensus_distance", "save", "close")


def look_at(session: hocket.Session, how: str, folder: Path) -> None:
    if how == "save":
        session.save(folder, keep=1)
    elif how in ("consensus", "replica"):
        with getattr(session, how)():
            pass
    else:
        getattr(session, how)()


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "sgp", "overlap_sgp", "periodic_average"])
@pytest.mark.parametrize("how", LOOKS)
def test_weights_that_were_set_aside_by_reference_are_as_they_were(
    strategy: str, how: str, tmp_path: Path
) -> None:
    """The most copied average of weights: the trained ones are kept by reference while others are in their place."""

    def run(rank: int) -> tuple[bool, bool, bool]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for x, y in batches(rank, 3):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            session.settle()
            trained = flat(model).clone()
            shadow = [torch.full_like(p.data, 0.5) for p in model.parameters()]
            kept = [p.data for p in model.parameters()]
            for parameter, value in zip(model.parameters(), shadow, strict=True):
                parameter.data = value
            look_at(session, how, tmp_path)
            shown = bool((flat(model) == 0.5).all())
            whole = all(bool((value == 0.5).all()) for value in shadow)
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.data = value
            return shown, whole, torch.equal(flat(model), trained)

    assert on_ranks(2, run) == [(True, True, True)] * 2


def test_a_consensus_shows_the_mean_of_what_parameters_were_set_to() -> None:
    def run(rank: int) -> float:
        model = mlp()
        with hocket.attach(model, sgd(model), "dpsgd") as session:
            kept = [p.data for p in model.parameters()]
            for parameter in model.parameters():
                parameter.data = torch.full_like(parameter, float(rank))
            with session.consensus():
                mean = float(flat(model).mean())
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.data = value
        return mean

    assert on_ranks(2, run) == [0.5, 0.5]


@pytest.mark.parametrize("strategy", ["sgd", "agd", "dpsgd"])
def test_gradients_that_are_kept_stay_as_they_were(strategy: str) -> None:
    """As in gradient surgery, with the gradients of each loss in a list, and across steps."""

    def run(rank: int) -> bool:
        model = mlp()
        optimizer = sgd(model)
        kept, copies = [], []
        with hocket.attach(model, optimizer, strategy):
            for number, (x, y) in enumerate(batches(rank, 6)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                kept += [p.grad for p in model.parameters()]
                copies += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                if number % 2:
                    optimizer.step()
        return all(a is not None and torch.equal(a, b) for a, b in zip(kept, copies, strict=True))

    assert on_ranks(2, run) == [True, True]


def test_after_close_each_parameter_has_memory_of_its_own() -> None:
    def run(rank: int) -> tuple[int, int, bool]:
        model = mlp()
        before = flat(model).clone()
        with hocket.attach(model, sgd(model), "sgd"):
            pass
        memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = sum(p.untyped_storage().nbytes() - p.nbytes for p in model.parameters())
        return len(memory), sizes, torch.equal(flat(model), before)

    assert on_ranks(2, run) == [(4, 0, True)] * 2


def test_other_programs_files_of_a_model_in_a_session_hold_its_weights(tmp_path: Path) -> None:
    """All of them, though they lie side by side: what writes files takes tensors of one storage for the same one."""

    def run(rank: int) -> list[bool]:
        model = mlp()
        with hocket.attach(model, sgd(model), "sgd"):
            file = tmp_path / f"{rank}.safetensors"
            save_file(model.state_dict(), file)
            kept = load_file(file)
            torch.save(model.get_parameter("2.bias").detach(), tmp_path / f"{rank}.pt")
            whole = all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
        part = torch.load(tmp_path / f"{rank}.pt")
        return [whole and len(kept) == 4, part.untyped_storage().nbytes() == part.nbytes]

    assert on_ranks(2, run) == [[True, True]] * 2
