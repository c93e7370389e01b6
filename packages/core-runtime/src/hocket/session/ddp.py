"""DistributedDataParallel around a session's model: noticed when it is built, and when it is called.

Its hooks come after the session's, or before: both would average, or optimizers get zeros. A model that has been in it,
and is called by itself, is as good as any: its hooks do nothing then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.parallel import DistributedDataParallel

from hocket.errors import AttachError, SessionError
from hocket.session.step.optimizers import is_attached, sessions_with
from hocket.session.torch_internals import outside_of_dynamo, replace_method
from hocket.strategy.strategy import Strategy


def refuse_ddp(strategy: Strategy, ranks: int, size: int, rank: int, step: int) -> None:
    """Refuse DistributedDataParallel that averages what a session exchanges.

    Args:
        strategy: the session's.
        ranks: the number of ranks that it averages over.
        size: the number of the session's ranks.
        rank, step: this rank, and the number of ended steps, for the message.

    Raises:
        SessionError: both would average.
    """
    between = ranks < size and not any(each.gradients for each in strategy.in_turn)
    if ranks > 1 and not between:
        raise SessionError(
            f"rank {rank}: DistributedDataParallel averages the model's gradients over {ranks} ranks at step {step}, "
            f"in addition to {strategy.name or 'the strategy'}. Call the plain model instead of ddp(x). Or use "
            "DistributedDataParallel alone, if need be with hocket.ddp_comm_hook; or within each host only "
            "(process_group=...), with a strategy that exchanges parameters between hosts (periodic_average, diloco)"
        )


def _look(called: DistributedDataParallel) -> None:
    # Without gradients, or within no_sync, it averages nothing.
    if torch.is_grad_enabled() and called.require_backward_grad_sync:
        for session in sessions_with(called.module.parameters()):
            session.called_by_ddp(called.process_group.size())


_look_uncompiled = outside_of_dynamo(_look)


@cache
def watch_ddp() -> None:
    """Refuse DistributedDataParallel around a model in a session from now on."""

    def refusing(build: Callable[..., None]) -> Callable[..., None]:
        def refuse(
            self: DistributedDataParallel, module: torch.nn.Module, *args: object, **kwargs: object
        ) -> None:
            if any(is_attached(parameter) for parameter in module.parameters()):
                raise AttachError(
                    "DistributedDataParallel was given a model that is in a session, so gradients would be averaged "
                    "twice (did a library wrap it, as accelerator.prepare(model) does?): train the plain model"
                )
            build(self, module, *args, **kwargs)

        return refuse

    def noticing(forward: Callable[..., object]) -> Callable[..., object]:
        def notice(self: DistributedDataParallel, *inputs: object, **kwargs: object) -> object:
            _look_uncompiled(self)
            return forward(self, *inputs, **kwargs)

        return notice

    replace_method(DistributedDataParallel, "__init__", refusing)
    replace_method(DistributedDataParallel, "forward", noticing)
