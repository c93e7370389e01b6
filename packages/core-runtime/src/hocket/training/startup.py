"""A delay of `import torch._dynamo`, which every step of an optimizer asks for, until something is compiled.

The import takes a rank one second of a core, as long as all of torch does besides, and what optimizers call of it
(`graph_break`, `disable`) has no effect if nothing is compiled. Only processes that Hocket starts itself do this.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import ParamSpec, TypeVar

_NAME = "torch._dynamo"

P = ParamSpec("P")
T = TypeVar("T")


def defer_dynamo() -> None:
    """Put a stand-in in the place of `torch._dynamo`, until more of it is used than optimizers call.

    If `torch._dynamo` has been imported already, nothing changes.
    """
    sys.modules.setdefault(_NAME, _StandIn(_NAME))


class _StandIn(ModuleType):
    """A stand-in for a module, until the first use of an attribute that optimizers do not call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> object:
        # `inspect` asks every module for its `__file__`; the import of a submodule asks for `__path__`.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {_NAME!r} has not been loaded and has no {name}")
        return getattr(self._load(), name)

    def graph_break(self, *args: object, **kwargs: object) -> None:
        """Do nothing: outside of compiled code there is no graph."""

    def disable(self, function: Callable[P, T] | None = None, *args: object, **kwargs: object) -> object:
        """Return a function that calls `function`, by the real module's `disable` as soon as that is loaded."""
        if function is None:
            return self._load().disable(function, *args, **kwargs)
        disabled: Callable[P, T] | None = None

        @wraps(function)
        def call(*given: P.args, **named: P.kwargs) -> T:
            nonlocal disabled
            if disabled is None and sys.modules.get(_NAME) is not self:
                disabled = self._load().disable(function, *args, **kwargs)
            return (disabled or function)(*given, **named)

        return call

    def _load(self) -> ModuleType:
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
        return importlib.import_module(_NAME)
