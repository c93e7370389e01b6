"""A component as a config names it, not built yet: what it becomes may need torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.config.document import Document, Location, Origin

__all__ = ["Reference"]


def _nowhere() -> Location:
    return Document(Origin("in code")).root


@dataclass(frozen=True)
class Reference:
    """A name and arguments, unchecked.

    Attributes:
        name: what it is called in configs.
        arguments: its fields or keyword arguments.
        where: where it was written, for errors; no part of its value.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
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
            raise place.error(f"got {place.given}" if "name" in where.value else "missing", allowed)
        return cls(name, arguments, where)

    @property
    def name_location(self) -> Location:
        """Where the name was written: the place itself where there is nothing but the name."""
        return self.where.child("name") if isinstance(self.where.value, Mapping) else self.where

    def plain(self) -> dict[str, Any]:
        """Return the reference as configuration."""
        return {"name": self.name, **self.arguments}
