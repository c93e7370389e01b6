"""A rank that trains on the stand-in device what it trains on the CPU, and tells what differs: see test_standin.py."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import standin
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.errors import ExchangeTimeoutError, NonFiniteError, SessionError
from hocket.session.torch_internals import is_nested_backward
from hocket.strategy import Strategy
from hocket.transport.device.groups import BACKENDS, Backend

STEPS = 4


class Model(nn.Module):
    """Linear layers of several segments, one of whose parameters gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Gloo:
    """A process group for the device: Gloo on views of its memory."""

    supports_coalescing = False

    def __init__(self, *given: Any) -> None:
        self._held = BACKENDS["cpu"].open(*given)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._held._set_default_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        def call(tensors: list[Tensor], *others: Any) -> Any:
            return getattr(self._held, name)([standin.here(tensor) for tensor in tensors], *others)

        return call


def train(
    strategy: str | Strategy, device: torch.device, nan_at: int | None = None, lanes: Any = "host"
) -> tuple[list[float], list[str], int]:
    """Return the parameters after `STEPS` steps, what has made the host wait in the last, and the steps left out."""
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    waits: list[str] = []
    # Who steps with gradients of its own and leaves out NaN has to wait for the device to know of it.
    on_nonfinite: Literal["skip", "error"] = "skip" if hocket.compose(strategy).gradients else "error"
    with hocket.attach(model, optimizer, strategy, on_nonfinite=on_nonfinite, lanes=lanes) as session:
        batches = torch.randn(STEPS, 4, 5, generator=torch.Generator().manual_seed(session.rank)).to(device)
        if nan_at is not None and session.rank == 1:
            batches[nan_at] = float("nan")
        for batch in batches:
            standin.waits.clear()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            waits = list(standin.waits)
        session.settle()
        skipped = session.skipped_steps
    return [each for p in model.parameters() for each in p.detach().cpu().flatten().tolist()], waits, skipped


def captured(strategy: str, device: torch.device) -> str:
    """Return the error of a step that is captured as a graph."""
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hocket.attach(model, optimizer, strategy)
    with session.accumulate():  # what a hook raised would end this device's thread, and with it the process
        model(torch.ones(4, 5).to(device)).square().mean().backward()
    try:
        standin.capturing = True
        optimizer.step()
    except SessionError as error:
        return str(error)
    finally:
        standin.capturing = False
        session.inner.abandon()
    return "nothing"


def spoiled(strategy: str, device: torch.device) -> str:
    """Return the error of a step after which a parameter is NaN."""
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("nan"))
    session = hocket.attach(model, optimizer, hocket.compose(strategy, "parameters.0.every=1"))
    model(torch.ones(4, 5).to(device)).square().mean().backward()
    try:
        optimizer.step()
    except NonFiniteError as error:
        return str(error)
    finally:
        session.inner.abandon()
    return "nothing"


def hung(strategy: str, device: torch.device) -> str:
    """Return the error of a step in which the device does not end what it does with other ranks."""
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hocket.attach(model, optimizer, strategy, lanes="nccl")
    session.peer.timeout_s = 1.0
    standin.hung = True
    try:
        model(torch.ones(4, 5).to(device)).square().mean().backward()
        optimizer.step()
    except ExchangeTimeoutError as error:
        return str(error)
    finally:
        standin.hung = False
        session.inner.abandon()
    return "nothing"


def nested(device: torch.device, *, reentrant: bool) -> list[bool]:
    """Return what hooks on the device's thread find of a backward that may be called by a node of another one."""
    model = Model().to(device)
    found: list[bool] = []
    for parameter in model.layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: found.append(is_nested_backward()))
    x = torch.ones(4, 5).to(device).requires_grad_()
    checkpoint(model.layers, x, use_reentrant=reentrant, preserve_rng_state=False).mean().backward()
    return found


def main() -> None:
    device, cpu = standin.set_up(), torch.device("cpu")
    torch.set_num_threads(1)
    BACKENDS[standin.NAME] = Backend("nccl", Gloo)
    del BACKENDS["cuda"]
    told: dict[str, Any] = {}
    *strategies, _, folder = sys.argv[1:]
    for name in strategies:
        recipe, *overrides = name.split(",")
        strategy = hocket.compose(recipe, *overrides)
        before = standin.copied
        found, waits, _ = train(strategy, device)
        copied = standin.copied - before
        told[name] = {"right": found == train(strategy, cpu)[0], "waits": waits, "copied": copied}
    for name in strategies:
        recipe, *overrides = name.split(",")
        strategy = hocket.compose(recipe, *overrides)
        found, waits, _ = train(strategy, device, lanes="nccl")
        told[f"{name} on lanes there"] = {"right": found == train(strategy, cpu)[0], "waits": waits}
    told["skipped on lanes there"] = [train("agd", device, 2, "nccl"), train("agd", cpu, 2)]
    told["skipped"] = [train("agd", where, nan_at=2) for where in (device, cpu)]
    told["virtual"] = [hocket.virtual(2).run(train, "dpsgd", where) for where in (device, cpu)]
    told["spoiled"] = [spoiled(strategy, device) for strategy in ("periodic_average", "dpsgd")]
    told["hung"] = [hung(strategy, device) for strategy in ("sgd", "sgp")]
    told["captured"] = [captured(strategy, device) for strategy in ("sgd", "dpsgd")]
    told["nested"] = [nested(device, reentrant=reentrant) for reentrant in (True, False)]
    told["threads"] = sorted(standin.threads)
    Path(folder, f"{hocket.join().rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
