"""Steps whose gradients hold NaN or Inf: refused, or left out.

Where gradients are exchanged, all ranks find it and leave the step out together. Where each rank steps with its own, a
rank with NaN leaves its step out alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from hocket.errors import NonFiniteElsewhereError, NonFiniteError, some
from hocket.session.exchange.active import ActiveExchange
from hocket.session.replica import Replica
from hocket.session.step.closures import Before
from hocket.session.step.grad_scaler import scaler_steps
from hocket.session.step.gradients import GradientSync


class NonFiniteSteps:
    """The handling of steps with NaN or Inf; GradScaler's own skipping comes before it.

    Args:
        replica: the replica; such steps are skipped if it may skip them, else they are errors.
        rank: this rank, for errors.

    Attributes:
        skipping: whether the step under way is skipped.
    """

    def __init__(self, replica: Replica, rank: int) -> None:
        self._storage = replica.storage
        self._parameters = replica.storage.parameters
        self._rank = rank
        self._may_skip = replica.may_skip
        self._island = replica.ranks.island
        self._before: Before | None = None
        self.skipping = False

    def begin_closure(self, optimizer: Optimizer, opened: Sequence[ActiveExchange]) -> None:
        """Back up the tensors that a step with a closure changes, as it may have to be undone.

        Args:
            optimizer: the optimizer that is about to step.
            opened: exchanges, whose compressors' states the closure changes.
        """
        if self._may_skip:
            self._storage.take_values()
            self._before = Before(self._storage.flats, optimizer, opened)

    def end_closure(self) -> None:
        """Undo the step that has ended, if it had a closure and is skipped."""
        if self.skipping and self._before is not None:
            self._storage.take_values()  # bound again, so that what is restored is theirs
            self._before.restore()
        self._before = None

    def leaves_out(
        self, optimizer: Optimizer, gradients: GradientSync | None, step: int, *, alone: bool
    ) -> bool:
        """Return whether an optimizer's step is skipped, and drop the gradients then.

        Args:
            optimizer: the optimizer that is about to use the gradients.
            gradients: the exchange that they come from; None where this rank exchanges none.
            step: its number.
            alone: whether this rank, without `gradients`, refuses by itself what several would; it leaves out its own
                step in any case.

        Raises:
            NonFiniteError: a gradient holds NaN or Inf, and such steps are not left out.
        """
        names: Sequence[str] = ()
        found = False
        if scaler_steps(optimizer):
            pass  # it has looked already
        elif gradients is not None:
            names, found = gradients.nonfinite, gradients.nonfinite_anywhere
        elif alone or self._may_skip:
            names = self._nonfinite_parameters()
            found = self._island.any(bool(names))
        if found and not self._may_skip:
            raise self._error(names, step)
        self.skipping = self.skipping or found
        if self.skipping:
            # An optimizer leaves parameters without gradient alone: no decay, no momentum.
            for parameter in self._parameters.values():
                parameter.grad = None
        return self.skipping

    def _nonfinite_parameters(self) -> list[str]:
        """Return the names of the parameters whose gradients hold NaN or Inf."""
        given = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        # One pass, which a single NaN or Inf poisons, and large numbers may, too.
        finite = [gradient.sum().isfinite() for gradient in given.values()]
        if not finite:
            return []
        flags = torch.stack(
            [each.to(finite[0].device) for each in finite]
        ).tolist()  # waits for a device once
        return [
            name
            for (name, gradient), fine in zip(given.items(), flags, strict=True)
            if not (fine or gradient.to_dense().isfinite().all())
        ]

    def _error(self, names: Sequence[str], step: int) -> NonFiniteError:
        if names:
            return NonFiniteError(
                f"the gradients of rank {self._rank} at step {step} hold NaN or Inf, in "
                f"{some(names)}. hocket.attach(..., on_nonfinite='skip'), or on_nonfinite=skip of hocket run, leaves "
                "such steps out on all ranks"
            )
        return NonFiniteElsewhereError(
            f"the gradients of step {step} hold NaN or Inf from another rank than {self._rank}, whose own message "
            "names the parameter. on_nonfinite='skip' leaves such steps out on all ranks"
        )
