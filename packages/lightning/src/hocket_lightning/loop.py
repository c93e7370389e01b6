"""The strategy of Lightning's Fabric, whose loop is the script's."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

import hocket
from hocket.errors import UserError
from hocket_lightning.frameworks import lightning
from hocket_lightning.ranks import RanksOfStrategy


class FabricStrategy(RanksOfStrategy, lightning("fabric.strategies").ParallelStrategy):  # type: ignore[misc]
    """The exchange of a Hocket strategy between the ranks of a Fabric script.

    Args:
        strategy, overrides, options: as `HocketStrategy`'s.

    Attributes:
        session: Hocket's session of the model that was set up last; None before `fabric.setup(model, optimizer)`.
    """

    _num_nodes = 1

    def __init__(self, strategy: str, *overrides: str, **options: Any) -> None:
        super().__init__()
        self._join(strategy, overrides, options)
        #: Of each model that was set up.
        self._sessions: list[hocket.Session] = []
        self._backward_sync_control = self

    @property
    def num_nodes(self) -> int:
        """The number of hosts, as Fabric was told."""
        return self._num_nodes

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to this rank's device."""
        module.to(self.root_device)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *more: Any) -> Any:
        """Attach a model and its optimizers; collective."""
        self.session = hocket.attach(module, optimizers, self._exchanges, peer=self._peer, **self._options)
        is_open = [each for each in self._sessions if each.inner.closes_together]
        self._sessions = [*is_open, self.session]
        return module, optimizers, *more

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer without its model.

        Raises:
            UserError: always.
        """
        raise UserError(
            "HocketStrategy attaches a model together with its optimizers: call fabric.setup(model, optimizer)"
        )

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Mark backwards that end no step; behind `fabric.no_backward_sync`."""
        own = next((each for each in self._sessions if each.model is module), None)
        return own.accumulate() if enabled and own is not None else nullcontext()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, minimum or maximum over the ranks; collective."""
        return self.reduce(tensor, group, reduce_op)

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Write the replicas' mean on rank 0; `session.save` keeps what training goes on from; collective."""
        with ExitStack() as means:
            for session in self._sessions:
                means.enter_context(session.consensus())
            super().save_checkpoint(*given, **named)
