"""What islands refuse, with the reason, on each rank; and what they only warn of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import hocket
from hocket.errors import (
    AttachError,
    DisagreementError,
    NonFiniteError,
    ReplacedError,
    SessionError,
    UserError,
)
from hocket.training import islands as training
from hocket.training.run import load_run
from hocket_eapipe import Pipeline
from islands.cases import Case, batch, make
from islands.task import Scaled
from islands.trained import shard

CASE = Case(["sgd"])


def main(folder: Path, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    refused_strategies(mesh["shard"])
    refused_models(mesh)
    refused_meshes(mesh["shard"])
    refused_runs()
    refused_steps(mesh["shard"])
    for style in ("nested", "tp"):
        unfrozen(init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "tp"))["tp"], style)
    nan_in_a_shard(mesh["shard"])
    shards_that_differ(mesh["shard"])
    warned(init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(message: str, model: nn.Module, *strategy: str, optimizer: Any = None, **given: Any) -> None:
    with pytest.raises(AttachError, match=message):
        hocket.attach(model, optimizer or sgd(model), hocket.compose(*strategy or ["sgd"]), **given)


def refused_strategies(mesh: Any) -> None:
    model = shard(make(CASE, 0), mesh, "nested")
    refused("`overlap: forward` merges parameters after FSDP", model, "dpsgd", "parameters.0.overlap=forward")
    refused("collective eager.* whatever is ready", model, "eager.majority")
    refused("collective adpsgd.* whatever is ready", model, "adpsgd")
    refused("^samples: .*the ranks of an island", model, "gossipgrad")
    refused("LBFGS steps with a closure", model, optimizer=torch.optim.LBFGS(model.parameters()))
    refused("Adafactor cannot step a sharded", model, optimizer=torch.optim.Adafactor(model.parameters()))
    refused("engine Pipeline needs whole models", model, engine=Pipeline())
    # Nothing of it is left behind.
    hocket.attach(model, sgd(model), "sgd").close()


def refused_models(mesh: Any) -> None:
    short = shard(make(CASE, 0).bfloat16(), mesh["shard"], "nested")
    refused(
        "push-sum keeps an unsharded float32 copy",
        short,
        "sgp",
        "parameters.0.topology=gossipgrad.random_push",
    )
    parts = make(CASE, 0)
    for block in parts.blocks:
        fully_shard(block, mesh=mesh["shard"])
    refused("parameter .* is not sharded, so its gradients are not summed", parts)
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused("^the model is sharded by FullyShardedDataParallel.*fully_shard", flat)
    of_others = nn.Linear(4, 4)
    part: Any = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    of_others.weight = nn.Parameter(DTensor.from_local(part, mesh["shard"], [Shard(0)]))
    refused("shard of parameter weight is a TwoTensor, which is not plain memory", of_others)
    model = shard(make(CASE, 0), mesh["shard"], "root")
    refused("same_samples names 'tp'", model, same_samples=["tp"])
    refused(r"same_samples='shard' is text: give a list of names, \['shard'\]", model, same_samples="shard")
    refused("is sharded over ranks .*but the island has ranks", model, island=mesh["island"])
    around = "FSDP gathers the parameters of module .norm. together with its outer module"
    part = model.blocks[0]  # type: ignore[index]
    refused(around, part)
    optimizer = sgd(part)
    with torch.no_grad():
        model(batch(CASE, 0, 0)[0])  # leaves the parameters gathered
    refused(around, part, optimizer=optimizer)


def refused_meshes(mesh: Any) -> None:
    """Islands that a named mesh makes unequal, or that are not the session's ranks."""
    model = shard(make(CASE, 0), mesh, "nested")
    first = distributed.get_rank() < 2
    left, right, everyone = (DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2], [1, 2, 3], [0, 1, 2, 3]))
    refused("islands overlap .ranks 0-1-2, 1-2-3.", model, island=left if first else right)
    unlike = "islands have different shapes .ranks 0-1-2-3, 2-3."
    refused(unlike, model, island=everyone if first else mesh)
    peer = hocket.join().group([0, 1] if first else [2, 3])
    refused("ranks of torch.distributed are not those of this session", model, island=everyone, peer=peer)
    for ended in hocket.virtual(2).run(lambda: attached_on_a_virtual_rank(mesh)):
        assert "virtual ranks cannot train a sharded model" in ended


def attached_on_a_virtual_rank(mesh: Any) -> str:
    model = shard(make(CASE, 0), mesh, "root")
    with pytest.raises(AttachError) as ended:
        hocket.attach(model, sgd(model), "sgd")
    return str(ended.value)


def refused_runs() -> None:
    run = load_run({"recipe": "agd", "task": "islands.task:Scaled", "island": {"shard": 2}})
    with pytest.raises(
        UserError, match=r"model of task islands.task:Scaled cannot be sharded; torch's reason: .*scalar"
    ):
        training.shard(Scaled().model(), run, Scaled(), torch.device("cpu"), lambda: None)


def refused_steps(mesh: Any) -> None:
    model = shard(make(CASE, 0), mesh, "nested")
    session = hocket.attach(model, sgd(model), "powersgd")
    x, y = batch(CASE, 0, session.data_rank)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(SessionError, match=r"backward\(\) ran twice.*session.accumulate\(\)"):
        F.cross_entropy(model(x), y).backward()
    session.inner.abandon()
    model = shard(make(CASE, 0), mesh, "nested")
    session = hocket.attach(model, sgd(model), "sgd")
    with pytest.raises(AttachError, match="SGD steps with a closure"):
        session.optimizer.step(lambda: F.cross_entropy(model(x), y).item())
    session.inner.abandon()
    hiding = shard(Hiding(), mesh, "root")
    session = hocket.attach(hiding, sgd(hiding), "sgd")
    batches = iter(session.data([(x, y)], weight=lambda given: 0.5))
    next(batches)
    hidden = r"a batch has weight 0.5, .*in the model's output, SimpleNamespace"
    with pytest.raises(SessionError, match=hidden):
        hiding(x)
    session.inner.abandon()


def unfrozen(mesh: Any, style: str) -> None:
    """A layer that was frozen at attach is not trained by an island alone."""
    case = Case(["agd"], style=style)
    whole = make(case, 0)
    whole.blocks.requires_grad_(False)
    model = shard(whole, mesh, style)
    session = hocket.attach(model, sgd(model), "agd")
    x, y = batch(case, 0, session.data_rank)
    whole.blocks.requires_grad_(True)
    message = r"blocks\.0\.norm\.weight was frozen at attach"
    with pytest.raises(ReplacedError, match=message):  # noqa: PT012
        F.cross_entropy(model(x), y).backward()
        session.optimizer.step()
    session.inner.abandon()


class Hiding(nn.Module):
    """A model whose output nobody looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5).double()

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layer(x))


def nan_in_a_shard(mesh: Any) -> None:
    """A rank whose shard is about to be sent with NaN is named, and so is the parameter."""
    model = shard(make(CASE, 0), mesh, "nested")
    session = hocket.attach(model, sgd(model), "dpsgd")
    x, y = batch(CASE, 0, session.data_rank)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        bias: Any = model.head.bias  # type: ignore[union-attr]
        bias.to_local().fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=rf"parameter head.bias .*of rank {session.rank} is NaN"):
        session.optimizer.step()
    session.inner.abandon()


def shards_that_differ(mesh: Any) -> None:
    """Two ranks hold other values for one shard, and one of them says so by the ranks' numbers in the session."""
    model = shard(make(CASE, 0), mesh, "nested")
    with hocket.attach(model, sgd(model), "agd") as session, logged() as lines:
        x, y = batch(CASE, 0, session.data_rank)
        F.cross_entropy(model(x), y).backward()
        session.optimizer.step()
        if session.rank == 3:
            with torch.no_grad():
                model.head.weight.to_local().add_(1.0)  # type: ignore[union-attr,operator]
        assert session.consensus_distance() > 0
        told = [line for line in lines if "rank 1's values differ from those of rank 3" in line]
        assert bool(told) == (session.rank == 1)
        assert all("the islands' replicas differ, although strategy agd" in line for line in told)
        with session.consensus():
            pass
    model = shard(make(CASE, 0), mesh, "nested")
    session = hocket.attach(model, sgd(model), "agd")
    session.optimizer.param_groups[0]["lr"] = 0.2 if session.rank == 3 else 0.1
    with pytest.raises(DisagreementError, match=r"lr: 0.1 on ranks 0, 1, 2, 0.2 on rank 3"):
        session.consensus()
    session.inner.abandon()


@contextmanager
def logged() -> Iterator[list[str]]:
    """Give the lines that this rank logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hocket").addHandler(handler)
    yield lines
    logging.getLogger("hocket").removeHandler(handler)


def warned(everyone: Any) -> None:
    model = shard(make(CASE, 0), everyone, "root")
    with logged() as lines, hocket.attach(model, sgd(model), "sgd") as session:
        assert session.data_size == 4
        assert bool([line for line in lines if "there is only one island" in line]) == session.is_main
