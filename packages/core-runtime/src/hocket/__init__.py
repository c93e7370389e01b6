"""Hocket: communication strategies for distributed PyTorch training.

    import hocket
    strategy = hocket.compose("agd")
    loader = hocket.loader(dataset, 32)
    with hocket.attach(model, optimizer, strategy) as session:
        for x, y in session.data(loader):
            optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()
        session.consensus()

This module imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING

from hocket.last_resort import LastResort

if TYPE_CHECKING:
    from hocket.compressor.ddp import ddp_comm_hook
    from hocket.launch.joining import join
    from hocket.session.attach import attach
    from hocket.session.session import Session
    from hocket.strategy import Strategy
    from hocket.strategy.compose import compose
    from hocket.strategy.in_python import chain
    from hocket.strategy.in_python import exchange as Exchange
    from hocket.task.loading import loader
    from hocket.trace import Observer, Trace
    from hocket.transport.virtual import VirtualWorld as virtual  # noqa: N813

__version__ = version("hocket-core")

__all__ = [
    "Exchange",
    "Observer",
    "Session",
    "Strategy",
    "Trace",
    "__version__",
    "attach",
    "chain",
    "compose",
    "ddp_comm_hook",
    "join",
    "loader",
    "virtual",
]

_logger = logging.getLogger("hocket")
_logger.addHandler(LastResort(_logger))

_HOMES = {
    "Exchange": ("hocket.strategy.in_python", "exchange"),
    "Observer": ("hocket.trace", "Observer"),
    "Session": ("hocket.session.session", "Session"),
    "Strategy": ("hocket.strategy", "Strategy"),
    "Trace": ("hocket.trace", "Trace"),
    "attach": ("hocket.session.attach", "attach"),
    "chain": ("hocket.strategy.in_python", "chain"),
    "compose": ("hocket.strategy", "compose"),
    "ddp_comm_hook": ("hocket.compressor.ddp", "ddp_comm_hook"),
    "loader": ("hocket.task.loading", "loader"),
    "join": ("hocket.launch.joining", "join"),
    "virtual": ("hocket.transport.virtual", "VirtualWorld"),
}


_show_uncaught = sys.excepthook


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show the error that ends a script; a user's mistake is one line, as it is on joined ranks."""
    from hocket.errors import HocketError

    if isinstance(error, HocketError):
        from hocket.launch.last_word import say_why

        say_why(error)
    _show_uncaught(kind, error, trace)


sys.excepthook = _uncaught


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
