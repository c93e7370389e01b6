"""Progress while the model computes: what is under way is looked at whenever a layer begins, or has its gradient.

Without it a message that needs both ends, as MPI's large ones do, would stand still meanwhile.

Source: GossipGraD (Daily et al. 2018), sec. 5.1, which calls MPI_Testall between layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.progress import ProgressEngine
from hocket.session.forward_merge import ModuleHook

__all__ = ["PassProgress"]


class PassProgress:
    """Sets the hooks of one model.

    Args:
        model: the attached model.
        progress: advances what is under way.
        backward: whether in backward, too. Where gradients are exchanged their own hooks do so.
    """

    def __init__(self, model: nn.Module, progress: ProgressEngine, *, backward: bool) -> None:
        def advance(*_: Any) -> None:
            progress.advance()

        self._handles: list[Any] = []
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if own:
                self._handles.append(module.register_forward_pre_hook(ModuleHook(module, advance)))
                if backward:
                    self._handles.append(own[0].register_post_accumulate_grad_hook(advance))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
