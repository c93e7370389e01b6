"""Progress in forward: what is under way then is looked at whenever a module with parameters begins its own.

Gradients' hooks do that in backward. Without it a message that needs both ends, as MPI's large ones do, would stand
still for the third of a step that forward takes.

Source: GossipGraD (Daily et al. 2018), sec. 5.1, which calls MPI_Testall between layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.progress import ProgressEngine
from hocket.session.forward_merge import only_for

__all__ = ["ForwardProgress"]


class ForwardProgress:
    """Sets the hooks of one model.

    Args:
        model: the attached model.
        progress: advances what is under way.
    """

    def __init__(self, model: nn.Module, progress: ProgressEngine) -> None:
        self._handles: list[Any] = [
            module.register_forward_pre_hook(only_for(module, progress.advance))
            for module in model.modules()
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
