"""The statistics of a session's model: those that the user names, and those of one rank alone."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence

from torch import distributed, nn

from hocket.errors import AttachError, some

_log = logging.getLogger("hocket")


def check_statistics(model: nn.Module, named: Sequence[str]) -> None:
    """Refuse names of statistics that match no floating-point buffer.

    Raises:
        AttachError: names the pattern, and the buffers that there are.
    """
    if isinstance(named, str):
        raise AttachError(f"statistics={named!r} is text: give a list of names, [{named!r}]")
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    for pattern in named:
        if not fnmatch.filter(buffers, pattern):
            raise AttachError(
                f"statistics: {pattern!r} matches none of the model's floating-point buffers: "
                f"{some(buffers) or 'it has none'}"
            )


def synchronises(module: nn.Module | None, ranks: int) -> bool:
    """Return whether a module's running statistics are of the batches of all `ranks` ranks."""
    if not isinstance(module, nn.SyncBatchNorm) or not distributed.is_available():
        return False
    return distributed.is_initialized() and distributed.get_world_size(module.process_group) == ranks


def warn_of_unsynchronised(model: nn.Module) -> None:
    """Warn of SyncBatchNorm that synchronises nothing, as torch.distributed has no process group."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if modules:
        _log.warning(
            "module %s: SyncBatchNorm needs a process group of torch.distributed, and there is none, so each rank "
            "normalises its own batch, as BatchNorm does. Call torch.distributed.init_process_group before attach, "
            "or keep BatchNorm",
            some(modules),
        )
