"""Checkpoints of islands: continued bit for bit, from other numbers of islands, and in torch's own format."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import hocket
from hocket.errors import CheckpointError
from islands.cases import IS_FULL, OPTIMIZERS, Case, batch, full, make
from islands.trained import shard

CASE = Case(["sgd"])
STRATEGIES = {
    "sgd": ["sgd"],
    "diloco": ["diloco", "parameters.0.every=2"],
    "overlap_sgp": ["overlap_sgp"],
    "redsync": ["redsync"],
    "powersgd": ["powersgd"],
}


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("island", "shard"))["shard"]
    if size == 2:  # one island, which goes on from the mean of two
        model, session = begun(mesh, ["dpsgd"], "sgd")
        assert not session.load(folder / "dpsgd").exact
        came_to = full(model)
        if session.is_main:
            torch.save(came_to, folder / "resumed.pt")
        given = {"model": get_model_state_dict(model)}
        load(given, checkpoint_id=folder / "dcp")
        set_model_state_dict(model, given["model"])
        came_to = full(model)
        if session.is_main:
            torch.save(came_to, folder / "read.pt")
        session.close()
        return
    for name, strategy in STRATEGIES.items():
        goes_on(folder / name, mesh, strategy, "adamw" if name == "sgd" else "sgd")
    if IS_FULL:
        for name, optimizer in (("sgd", "sgd"), ("diloco", "adamw")):
            goes_on(folder / f"{name} {optimizer}", mesh, STRATEGIES[name], optimizer)
    for name in ("diloco", "overlap_sgp", "redsync"):
        goes_on_in_torch(folder / f"{name} in torch", mesh, STRATEGIES[name])
    leaves(folder, mesh)
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    _, session = begun(whole, ["dpsgd"], "sgd")
    with pytest.raises(
        CheckpointError, match="saved by islands of 2 ranks, but this session has islands of 4"
    ):
        session.load(folder / "dpsgd")
    session.inner.abandon()


def begun(mesh: Any, strategy: list[str], optimizer: str) -> tuple[nn.Module, hocket.Session]:
    model = shard(make(CASE, 0), mesh, "nested")
    step = OPTIMIZERS[optimizer](list(model.parameters()))
    return model, hocket.attach(model, step, hocket.compose(*strategy))


def steps(session: hocket.Session, first: int, last: int) -> None:
    for number in range(first, last):
        x, y = batch(CASE, number, session.data_rank)
        session.optimizer.zero_grad()
        F.cross_entropy(session.model(x), y).backward()
        session.optimizer.step()


def goes_on(folder: Path, mesh: Any, strategy: list[str], optimizer: str) -> None:
    """Compare a run with one that was saved in its middle and loaded elsewhere."""
    model, session = begun(mesh, strategy, optimizer)
    steps(session, 0, 3)
    session.save(folder)
    steps(session, 3, 7)
    session.close()
    expected = full(model)
    model, session = begun(mesh, strategy, optimizer)
    steps(session, 20, 22)  # other values, which the checkpoint's replace
    with torch.no_grad():
        model(batch(CASE, 0, 0)[0])  # leaves parameters gathered
    assert session.load(folder).exact
    steps(session, 3, 7)
    session.close()
    given = full(model)
    assert all(torch.equal(given[name], expected[name]) for name in expected), folder.name


def goes_on_in_torch(folder: Path, mesh: Any, strategy: list[str]) -> None:
    """Do the same with the session in a checkpoint of torch's, beside model and optimizer."""
    model, session = begun(mesh, strategy, "sgd")
    steps(session, 0, 3)
    own = session.state_dict()
    optimizer = get_optimizer_state_dict(model, session.optimizer)
    momenta = locals_of(optimizer)
    with session.consensus():
        state = {"model": get_model_state_dict(model), "optimizer": optimizer, "session": own}
        save(state, checkpoint_id=folder)
    steps(session, 3, 7)
    session.close()
    expected = full(model)
    model, session = begun(mesh, strategy, "sgd")
    steps(session, 20, 22)
    optimizer = get_optimizer_state_dict(model, session.optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": optimizer}
    load(state, checkpoint_id=folder)
    compare_momenta(locals_of(optimizer), momenta, session.rank)
    options = StateDictOptions(strict=False)  # a parameter that is not used has no state
    set_optimizer_state_dict(model, session.optimizer, optimizer, options=options)
    load({"session": session}, checkpoint_id=folder)
    assert session.step == 3
    steps(session, 3, 7)
    session.close()
    given = full(model)
    assert all(torch.equal(given[name], expected[name]) for name in expected), folder.name


def locals_of(optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of this rank's parts of the momentum."""
    return {name: each["momentum_buffer"].to_local().clone() for name, each in optimizer["state"].items()}


def compare_momenta(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], rank: int) -> None:
    """Compare a rank's part of the momentum with the same parts of all islands, of which torch saves one."""
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, saved)
    for name, part in loaded.items():
        assert any(torch.equal(part, each[name]) for each in of_ranks[rank % 2 :: 2]), name


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the warnings of replicas that are mixed."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "mix replicas" in record.getMessage())
    logging.getLogger("hocket").addHandler(handler)
    yield texts
    logging.getLogger("hocket").removeHandler(handler)


def leaves(folder: Path, mesh: Any) -> None:
    """Save replicas that differ, for another number of islands, and their mean in torch's format."""
    model, session = begun(mesh, ["dpsgd"], "sgd")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * (distributed.get_rank() // 2))  # an island's own
    session.save(folder / "dpsgd")
    with warned() as warnings_given, session.consensus():
        mean = full(model)
        save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "torch")
    assert not warnings_given
    with warned() as warnings_given:
        save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "mixed")
    assert len(warnings_given) == (session.rank == 2), warnings_given
    session.export(folder / "dcp", "dcp")
    session.export(folder / "whole", max_shard_bytes=2000)
    session.export(folder / "replicas", replica=True)
    with pytest.raises(CheckpointError, match="but these ranks hold several replicas"):
        session.export(folder / "no", "dcp", replica=True)
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, which Hocket did not write"):
        session.export(folder / "theirs")
    if session.is_main:
        torch.save(mean, folder / "mean.pt")
    session.close()
