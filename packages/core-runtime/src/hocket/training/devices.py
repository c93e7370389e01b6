"""The device that a run trains on, and the dtype that its model computes in. Importing this imports no torch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.config.settings import Device, Precision, TransportName
from hocket.errors import UserError
from hocket.plain import Batch
from hocket.session.engine import ReplicaEngine
from hocket.training.run import RunConfig, build_engine

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hocket.session.api import Loss
    from hocket.transport.peer import Peer

# The devices of NVIDIA's driver, on Linux and within Windows.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


def choose_device(run: RunConfig) -> Device:
    """Return a run's device, the CPU or CUDA; torch is imported only if there is a driver.

    Raises:
        UserError: CUDA was asked for, and cannot be used; gives the reason.
    """
    if run.device is Device.CPU:
        return Device.CPU
    reason = _reason_against_cuda(run)
    if reason is None:
        return Device.CUDA
    if run.device is Device.CUDA:
        raise UserError(f"device=cuda is not possible: {reason}. Use device=cpu, or device=auto")
    return Device.CPU


def _reason_against_cuda(run: RunConfig) -> str | None:
    if run.transport is TransportName.VIRTUAL and any(each.gradients for each in run.strategy.in_turn):
        return "virtual ranks share autograd's one thread for CUDA, so they cannot wait for each other's gradients"
    if not isinstance(build_engine(run), ReplicaEngine):
        return f"engine {run.engine.name} keeps its stages on the CPU"
    return None if _has_cuda() else "torch finds no CUDA device here (`hocket doctor` says what there is)"


def _has_cuda() -> bool:
    if "+cpu" in version("torch") or not any(Path(driver).exists() for driver in _DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


def device_of(run: RunConfig, peer: Peer) -> torch.device:
    """Return this rank's device; a host's ranks take its GPUs in turns; collective."""
    import torch

    from hocket.session.ranks import local_rank

    number = local_rank(peer)
    if choose_device(run) is Device.CPU:
        return torch.device("cpu")
    return torch.device("cuda", number % torch.cuda.device_count())


def in_precision(run: RunConfig, model: nn.Module, loss: Loss, device: torch.device) -> Loss:
    """Make `model` compute in a run's precision, in training and evaluation; return a loss that does so, too.

    Raises:
        UserError: the engine does not call the model as a whole.
    """
    if run.precision is Precision.FLOAT32:
        return loss
    if not isinstance(build_engine(run), ReplicaEngine):
        raise UserError(
            f"engine {run.engine.name} computes in float32 only, not in {run.precision}: leave precision out"
        )
    import torch

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16)

    forward = model.forward

    def cast(*args: Batch, **kwargs: Batch) -> Batch:
        with autocast():
            return forward(*args, **kwargs)

    model.forward = cast  # of this object alone: names of parameters stay

    def cast_loss(output: Tensor, target: Tensor) -> Tensor:
        with autocast():
            return loss(output, target)

    return cast_loss


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return a batch, any nesting of tuples, lists and dictionaries, with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
