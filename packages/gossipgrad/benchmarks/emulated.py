"""Training on an emulated accelerator, which waits instead of computing, and how long its steps take.

Every layer has as many parameters, and takes as long, as every other: a third of its time forward, two thirds backward.
As with a real accelerator the host launches forward layers without waiting for them, each when its parameters are
there. In backward the accelerator is one layer ahead of what the host does with the layer before (its hooks, copies and
messages), and the host has a layer's gradient when that is over. On virtual ranks time is the virtual clock's;
elsewhere the training thread sleeps, so that what is left of the cores is the network's, as beside a real accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.delays import Delays
from hocket.trace.observer import Observer
from hocket.transport.peer import Peer, gather


@dataclass(frozen=True)
class Machine:
    """The emulated model.

    Attributes:
        layers: their number.
        numel: parameters of each, float32.
        compute_s: seconds of a whole step, forward and backward.
    """

    layers: int
    numel: int
    compute_s: float


@dataclass(frozen=True)
class Timing:
    """The costs of a step on the slowest rank, on average.

    Attributes:
        seconds: from its begin to its end.
        host_wait_s: in which the training thread waited for an exchange, on average over ranks; in forward the
            accelerator may compute meanwhile.
        cpu_s: the process's, all threads; of all ranks together where they are virtual.
    """

    seconds: float
    host_wait_s: float
    cpu_s: float


class _Accelerator:
    """Executes one layer after the other.

    Attributes:
        free_s: when all that was launched is over, on the peer's clock.
    """

    def __init__(self, peer: Peer) -> None:
        self.free_s = 0.0
        self._peer = peer

    def launch(self, seconds: float, ahead_s: float = 0.0) -> None:
        """Execute a layer when those before are over, and not before it was launched: up to `ahead_s` ago."""
        self.free_s = max(self.free_s, self._peer.clock.now() - ahead_s) + seconds

    def synchronise(self) -> None:
        """Wait until all that was launched is over."""
        left_s = self.free_s - self._peer.clock.now()
        if left_s > 0:
            if self._peer.transport == "virtual":
                self._peer.clock.elapse(left_s)
            else:
                time.sleep(left_s)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _EmulatedLayer) -> Tensor:
        ctx.layer = layer
        layer.accelerator.launch(layer.seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        layer = ctx.layer
        seconds = layer.seconds * 2 / 3
        layer.accelerator.launch(seconds, ahead_s=seconds)
        layer.accelerator.synchronise()
        return gradient, layer.gradient.clone(), None


class _EmulatedLayer(nn.Module):
    def __init__(self, numel: int, seconds: float, accelerator: _Accelerator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        # Values that compressors find large and small ones among.
        self.gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        self.seconds = seconds
        self.accelerator = accelerator

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Layer.apply(x, self.weight, self)
        return result


def exchanged_bytes(machine: Machine) -> int:
    """Return the bytes of a model."""
    return 4 * machine.numel * machine.layers


def measure(
    peer: Peer,
    machine: Machine,
    strategy: tuple[str, ...],
    steps: int,
    observer: Observer | None = None,
    delays: Delays | None = None,
) -> Timing:
    """Train so many steps, after two that are not measured; collective.

    Args:
        peer: this rank's.
        machine: what computes.
        strategy: a recipe and overrides.
        steps: how many.
        observer: what is told of the session.
        delays: how late ranks are; None for never.
    """
    model = _model(peer, machine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hocket.attach(model, optimizer, hocket.compose(*strategy), peer=peer, observer=observer) as session:
        return _timed(peer, model, optimizer, steps, lambda: session.counters.exposed_wait_s, delays)


def measure_ddp(peer: Peer, machine: Machine, steps: int) -> Timing:
    """Train with DistributedDataParallel, whose process group has been initialised; collective."""
    model = _model(peer, machine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = nn.parallel.DistributedDataParallel(model)
    return _timed(peer, replica, optimizer, steps, lambda: 0.0)


def _model(peer: Peer, machine: Machine) -> nn.Module:
    accelerator = _Accelerator(peer)
    seconds = machine.compute_s / machine.layers
    layers = (_EmulatedLayer(machine.numel, seconds, accelerator) for _ in range(machine.layers))
    return nn.Sequential(*layers)


def _timed(
    peer: Peer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    waited_s: Callable[[], float],
    delays: Delays | None = None,
) -> Timing:
    x = torch.zeros(1, requires_grad=True)
    taken = 0

    def step() -> None:
        nonlocal taken
        if delays is not None:
            peer.clock.sleep(float(delays.of_step(taken, peer.size, 0)[peer.rank]))
        taken += 1
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    step()
    lane = peer.lane("timing")
    lane.ibarrier().wait()
    start_s, cpu_s, before_s = peer.clock.now(), time.process_time(), waited_s()
    for _ in range(steps):
        step()
    own = (
        (peer.clock.now() - start_s) / steps,
        (waited_s() - before_s) / steps,
        (time.process_time() - cpu_s) / steps,
    )
    told = gather(peer, own)
    lane.close()
    took, waited, cpu = zip(*told, strict=True)
    return Timing(max(took), sum(waited) / len(waited), sum(cpu) / len(cpu))
