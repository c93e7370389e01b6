"""Computing on the virtual clock: each layer's forward and backward take their share of a batch's seconds."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hocket.plan.utilisation import BACKWARD_SHARE
from hocket.session.exchange.forward import ModuleHook
from hocket.session.torch_internals import at_end_of_backward, current_backward
from hocket.strategy.exchange import Overlap
from hocket.strategy.strategy import Strategy
from hocket.transport.peer import Clock


class Computing:
    """The time of computing a batch, which passes on a clock while the batch is computed.

    A third passes in forward and two thirds in backward, in each layer in proportion to its trainable elements, so that
    exchanges overlap with the layers computed meanwhile. If no exchange overlaps, all of it passes before forward.

    It must be made before a session, so that its hooks run first: a gradient is in when its computing is over.

    Args:
        model: the model, by whose layers the time passes.
        strategy: the strategy, for whether an exchange overlaps.
        clock: the clock on which the time passes.
        by_layer: whether layers may wait: not on a GPU, where backwards of all virtual ranks share a thread, nor if an
            engine runs parts of the model.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, clock: Clock, *, by_layer: bool) -> None:
        self._clock = clock
        #: Seconds of the batch under way that have not passed yet.
        self._left_s = 0.0
        self._batch_s = 0.0
        self._ran: set[nn.Module] = set()
        self._backward = -1
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._numel = sum(parameter.numel() for parameter in trained)
        exchanges = [each for phase in strategy.in_turn for each in phase.exchanges]
        self._by_layer = by_layer and any(each.overlap is not Overlap.NONE for each in exchanges)
        if self._by_layer:
            for module in model.modules():
                own = [p.numel() for p in module.parameters(recurse=False) if p.requires_grad]
                if own:
                    module.register_forward_hook(ModuleHook(module, self._forward_of(module, sum(own))))
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._backward_of(parameter.numel()))

    def begin(self, seconds: float) -> None:
        """Begin a batch that takes `seconds`, 0 or more, before its forward."""
        self._batch_s = self._left_s = seconds
        self._ran.clear()
        if not self._by_layer:
            self.end()

    def end(self) -> None:
        """Let the rest of the batch's seconds pass, as for layers that it did not reach."""
        self._pass(self._left_s)

    def _forward_of(self, module: nn.Module, numel: int) -> Callable[..., None]:
        def ran(*_: object) -> None:
            if module not in self._ran:
                self._ran.add(module)
                self._pass(self._batch_s * (1 - BACKWARD_SHARE) * numel / self._numel)

        return ran

    def _backward_of(self, numel: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if current_backward() != self._backward:
                self._backward = current_backward()
                at_end_of_backward(self.end)
                self._pass(
                    self._left_s - self._batch_s * BACKWARD_SHARE
                )  # of layers that forward did not reach
            self._pass(self._batch_s * BACKWARD_SHARE * numel / self._numel)

        return arrived

    def _pass(self, seconds: float) -> None:
        passing_s = min(seconds, self._left_s)
        if passing_s > 0:
            self._left_s -= passing_s
            self._clock.elapse(passing_s)
