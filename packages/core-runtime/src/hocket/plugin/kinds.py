"""The kinds of components and the contract that a class must keep to be one."""

from __future__ import annotations

import importlib
import typing
from enum import StrEnum
from functools import cache
from typing import Any


class Kind(StrEnum):
    """A kind of component that a plugin may provide."""

    TOPOLOGY = "topology"
    COLLECTIVE = "collective"
    COMPRESSOR = "compressor"
    SCOPE = "scope"
    SEGMENTATION = "segmentation"
    OUTER = "outer"
    MERGE = "merge"
    SAMPLES = "samples"
    ENGINE = "engine"
    TASK = "task"
    DELAYS = "delays"
    LOGGER = "logger"

    @property
    def interface_path(self) -> str:
        """The path of the kind's abstract class, as `module:Class`."""
        return _INTERFACES[self]

    @property
    def interface(self) -> type:
        """The kind's abstract class, imported when it is first asked for."""
        interface: type = import_object(self.interface_path)
        return interface


# Paths and not classes: an engine's or a task's module may be heavy, and most configs need neither.
_INTERFACES = {
    Kind.TOPOLOGY: "hocket.topology.api:Topology",
    Kind.COLLECTIVE: "hocket.collective.api:Collective",
    Kind.COMPRESSOR: "hocket.compressor.api:Compressor",
    Kind.SCOPE: "hocket.strategy.scope:Scope",
    Kind.SEGMENTATION: "hocket.segment.partition:Segmentation",
    Kind.OUTER: "hocket.outer.api:Outer",
    Kind.MERGE: "hocket.outer.api:Merge",
    Kind.SAMPLES: "hocket.strategy.samples:SampleShuffle",
    Kind.ENGINE: "hocket.session.engine:Engine",
    Kind.TASK: "hocket.task.api:Task",
    Kind.DELAYS: "hocket.delays.api:Delays",
    Kind.LOGGER: "hocket.loggers.api:Logger",
}


def import_object(path: str) -> Any:
    """Return the object that `module:name` names.

    Raises:
        ValueError: `path` is not of that form.
        ImportError: the module does not import.
        AttributeError: the module has no such name.
    """
    module, separator, name = path.partition(":")
    if not (separator and module and name) or module.startswith("."):
        raise ValueError(f"{path!r} is not of the form 'module:Class'")
    return getattr(importlib.import_module(module), name)


@cache
def check_component(kind: Kind, component: object) -> None:
    """Refuse a component that is not a concrete frozen dataclass that implements the interface of `kind`.

    Raises:
        ValueError: names what `component` lacks, as the end of a sentence that begins with its name.
    """
    interface = kind.interface
    if not (isinstance(component, type) and issubclass(component, interface)):
        raise ValueError(f"is not a subclass of {interface.__module__}.{interface.__qualname__}")
    # Looked up in the class itself: a subclass that forgot the decorator inherits its parent's parameters.
    parameters = vars(component).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise ValueError("is not a frozen dataclass (write @dataclass(frozen=True) above it)")
    abstract: frozenset[str] = vars(component).get("__abstractmethods__", frozenset())
    if abstract:
        raise ValueError(f"does not implement {', '.join(sorted(abstract))}")
    if "name" in vars(component)["__dataclass_fields__"]:
        raise ValueError("has a field called 'name', but `name` in a config is the component's name")
    try:
        typing.get_type_hints(component)
    except NameError as error:
        raise ValueError(f"has an annotation that cannot be evaluated at run time: {error}") from error


def kind_of_hint(hint: object) -> Kind | None:
    """Return the kind whose interface `hint` is or implements, or None for a plain field's type."""
    if not isinstance(hint, type):
        return None
    ancestors = {f"{base.__module__}:{base.__qualname__}" for base in hint.__mro__}
    return next((kind for kind in Kind if kind.interface_path in ancestors), None)
