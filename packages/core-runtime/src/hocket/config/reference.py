"""References to components that are not built yet, as that may need torch, and to classes of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TypeVar

from hocket.config.document import Document, Location, Origin
from hocket.errors import suggest
from hocket.plain import Tree, TreeView
from hocket.plugin.discovery import cause_of
from hocket.plugin.kinds import import_object

T = TypeVar("T")

#: The form of a reference, for errors.
REFERENCE = "a name, or a mapping with a name and arguments"

_NUMBERS = (int, float, "int", "float")  # torch's annotations are text in some of its modules


def _nowhere() -> Location:
    return Document(Origin("in code")).root


@dataclass(frozen=True)
class Reference:
    """A name and arguments, unchecked.

    Attributes:
        name: the name in configs.
        arguments: the fields or keyword arguments.
        where: the place in the configuration, for errors; not compared.
    """

    name: str
    arguments: TreeView = field(default_factory=dict)
    where: Location = field(default_factory=_nowhere, compare=False, repr=False)

    @classmethod
    def read(cls, where: Location, allowed: str) -> Reference:
        """Read a name alone, or a mapping with a name and arguments.

        Raises:
            ConfigError: neither; the message ends with `allowed`.
        """
        if isinstance(where.value, str):
            return cls(where.value, {}, where)
        if not isinstance(where.value, Mapping):
            raise where.error(f"got {where.given}", allowed)
        arguments = dict(where.value)
        name = arguments.pop("name", None)
        if not isinstance(name, str):
            place = where.child("name")
            if "name" in where.value:
                raise place.error(f"got {place.given}", "a name")
            written = ", ".join(["name: ...", *(f"{key}: {where.child(key).given}" for key in arguments)])
            raise where.error(f"this mapping has no `name`; write {{{written}}}, or a name alone")
        return cls(name, arguments, where)

    def nested(self, key: str) -> Reference:
        """Return the reference that an argument is.

        Raises:
            ConfigError: the argument is none.
        """
        return self._read_nested(self.arguments[key], self.where.child(key))

    def nested_list(self, key: str) -> list[Reference]:
        """Return the references in an argument that is a list; none if it is not given.

        Raises:
            ConfigError: the argument is no such list.
        """
        given, where = self.arguments.get(key, []), self.where.child(key)
        if not isinstance(given, list):
            raise where.error(f"got {given!r}", f"a list; each item is {REFERENCE}")
        return [self._read_nested(each, where.child(place)) for place, each in enumerate(given)]

    def _read_nested(self, given: object, where: Location) -> Reference:
        # A reference made in code has no place.
        return Reference.read(replace(where, value=given), REFERENCE)

    def without(self, *keys: str) -> Reference:
        """Return the reference without some of its arguments."""
        return replace(self, arguments={k: v for k, v in self.arguments.items() if k not in keys})

    def find_class(self, what: str, base: type[T], module: ModuleType, *left_out: type) -> type[T]:
        """Return the class that the name means.

        Args:
            what: the kind of class, for errors.
            base: the class from which it must be derived.
            module: a module of such classes, which are named without regard to case; others are written `module:Class`.
            left_out: those of the module that no config may name.

        Raises:
            ConfigError: there is no such class; names source and key.
        """
        if ":" not in self.name:
            named: dict[str, type[T]] = {
                name.lower(): found
                for name, found in vars(module).items()
                if inspect.isclass(found) and issubclass(found, base)
                if found not in (base, *left_out) and not name.startswith("_")
            }
            if self.class_name not in named:
                allowed = f"{', '.join(sorted(named))}, or one of your own as module:Class"
                problem = f"there is no {what} {self.name!r}"
                raise self.name_location.error(problem, allowed, suggest(self.class_name, named))
            return named[self.class_name]
        try:
            found = import_object(self.name)
        except (Exception, SystemExit) as error:  # whatever the module raises
            raise self.name_location.error(
                f"cannot import the {what} {self.name!r}: {cause_of(error)}"
            ) from error
        if not (inspect.isclass(found) and issubclass(found, base)):
            raise self.name_location.error(
                f"{self.name!r} is not a subclass of {base.__module__}.{base.__name__}"
            )
        return found

    @property
    def class_name(self) -> str:
        """The name of a class of torch in lower case, as in configs, or of another as `module:Class`."""
        return self.name if ":" in self.name else self.name.lower()

    @property
    def name_location(self) -> Location:
        """The place of the name: the reference's own if it is a name alone."""
        return self.where.child("name") if isinstance(self.where.value, Mapping) else self.where

    def plain(self) -> Tree:
        """Return the reference as configuration."""
        return {"name": self.name, **self.arguments}

    def check_arguments(self, called: Callable[..., object], leave_out: Collection[str]) -> Tree:
        """Return the arguments as keyword arguments, lists as the tuples that torch wants.

        Args:
            called: the class, which is not Hocket's own; its signature is the schema.
            leave_out: parameters that a config cannot give.

        Raises:
            ConfigError: an unknown argument, or a value that should be a number or truth value; names source and key.
        """
        parameters = _parameters(called, leave_out)
        arguments = {}
        for key, value in self.arguments.items():
            where = self.where.child(key)
            if key not in parameters:
                raise where.error(
                    f"unknown argument of {self.name}", ", ".join(parameters), suggest(key, parameters)
                )
            default = parameters[key].default
            numeric = isinstance(default, int | float) and not isinstance(default, bool)
            required = default is inspect.Parameter.empty and parameters[key].annotation in _NUMBERS
            if (numeric or required) and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise where.error(f"got {where.given}", "a number")
            if isinstance(default, bool) and not isinstance(value, bool):
                raise where.error(f"got {where.given}", "true or false")
            arguments[key] = tuple(value) if isinstance(value, list) else value
        return arguments

    def complete_arguments(self, called: Callable[..., object], leave_out: Collection[str]) -> Tree:
        """Return all keyword arguments that have a value, with the signature's defaults, as plain values.

        Args, Raises: as in `check_arguments`.
        """
        parameters = _parameters(called, leave_out)
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        complete = defaults | self.check_arguments(called, leave_out)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in complete.items()}


def _parameters(called: Callable[..., object], leave_out: Collection[str]) -> dict[str, inspect.Parameter]:
    given = inspect.signature(called).parameters
    return {name: parameter for name, parameter in given.items() if name not in leave_out}
