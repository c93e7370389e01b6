"""The hooks on parameters by which an exchange takes over each gradient that a backward has finished."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hocket.segment.shards import whole_of
from hocket.session.exchange.segment_state import GradientSlot
from hocket.session.step.account import Account
from hocket.session.torch_internals import accumulation_of


class ParameterHooks:
    """The hooks of one exchange on the parameters, which come after those that others have set.

    Attributes:
        held: the gradients of the backward under way that somebody else's later hook has yet to see.
    """

    def __init__(self) -> None:
        self.held: set[GradientSlot] = set()
        self._handles: list[RemovableHandle] = []
        # Autograd keeps them, and so their hooks, only as long as somebody does.
        self._nodes: list[Node] = []
        # Each parameter's hooks, with the key of the session's, and how many there were of all when those were set.
        self._hooks: list[tuple[GradientSlot, dict[int, Any], int]] = []
        self._num_hooks = 0
        self._frozen: list[GradientSlot] = []

    def set(
        self,
        gradients: Iterable[GradientSlot],
        arrived: Callable[[GradientSlot], None],
        account: Account | None,
    ) -> None:
        """Set them.

        Args:
            gradients: those of parameters that are frozen are left out: torch sets no hook there.
            arrived: a method, called with each gradient that is finished.
            account: sets gradients aside that the next ones would be added to.
        """
        for gradient in gradients:
            parameter = gradient.parameter
            if not parameter.requires_grad:
                self._frozen.append(gradient)
            else:
                handle = parameter.register_post_accumulate_grad_hook(_hook_after(gradient, arrived))
                self._handles.append(handle)
                self._hooks.append((gradient, parameter._post_accumulate_grad_hooks, handle.id))
                if account is not None:
                    node = accumulation_of(whole_of(parameter))
                    self._handles.append(node.register_prehook(_hook_before(gradient, account)))
                    self._nodes.append(node)
        self._num_hooks = self._count()

    def take_unfrozen(self) -> list[GradientSlot]:
        """Take the gradients that are without hooks, and whose parameters are not frozen any more."""
        unfrozen = [gradient for gradient in self._frozen if gradient.parameter.requires_grad]
        self._frozen = [gradient for gradient in self._frozen if gradient not in unfrozen]
        return unfrozen

    def _count(self) -> int:
        return sum(len(hooks) for _, hooks, _ in self._hooks)

    def begin_backward(self) -> None:
        """Note which gradients hooks that were set since have yet to see in this backward."""
        self.held = set()
        if self._count() != self._num_hooks:
            self.held = {gradient for gradient, hooks, key in self._hooks if next(reversed(hooks)) != key}

    def end_backward(self) -> None:
        """Move the hooks behind those set since; FSDP goes through a parameter's hooks while backward begins."""
        for gradient, hooks, key in self._hooks if self.held else ():
            if gradient in self.held:
                hooks[key] = hooks.pop(key)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()


def _hook_after(gradient: GradientSlot, arrived: Callable[[GradientSlot], None]) -> Callable[[Tensor], None]:
    # The garbage collector does not see what such a hook refers to: a session that is given up without `close` would
    # stay for ever, with its model. The optimizer's hooks keep it for as long as there is an optimizer.
    slot_ref, arrived_ref = weakref.ref(gradient), weakref.WeakMethod(arrived)

    # A function, not a method: `copy.deepcopy` of a model copies hooks, and must not copy the session with them.
    def hook(parameter: Tensor) -> None:
        gradient, arrived = slot_ref(), arrived_ref()
        if arrived is not None and gradient is not None and parameter is gradient.parameter:
            arrived(gradient)

    return hook


def _hook_before(gradient: GradientSlot, account: Account) -> Callable[[Sequence[Tensor]], None]:
    slot_ref, account_ref = weakref.ref(gradient), weakref.ref(account)

    def hook(_: Sequence[Tensor]) -> None:
        gradient, account = slot_ref(), account_ref()
        if account is not None and gradient is not None and gradient in account.unstepped:
            account.set_aside(gradient)

    return hook
