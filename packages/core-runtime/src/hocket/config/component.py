"""Build components and records from configuration, their dataclasses being the schema, and describe them."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Collection, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from hocket.config.document import Location
from hocket.config.reference import REFERENCE, Reference
from hocket.config.schema import read_value
from hocket.configured import allowed_by, optional
from hocket.errors import ConfigError
from hocket.plain import Tree, TreeView
from hocket.plugin import Kind, Registry, default_registry
from hocket.plugin.kinds import kind_of_hint
from hocket.quantities import BITS, bits_per_second, seconds, unit_of_key

T = TypeVar("T")

#: The name that stands for no component, if none is needed.
_NONE = "none"


def build_component(kind: Kind, where: Location, registry: Registry) -> Any:
    """Build a component from its name, a mapping with its name and fields, or, for compressors, a list.

    Raises:
        ConfigError: another form, no such component, or a field it cannot have.
        MissingPluginError: the plugin that it comes from cannot be loaded.
    """
    if kind is Kind.COMPRESSOR and isinstance(where.value, list) and where.value:
        return _build_chain(where, registry)
    return build_reference(kind, _component_reference(kind, where), registry)


def _component_reference(kind: Kind, where: Location) -> Reference:
    return Reference.read(where, f"a {kind} by name, or a mapping with its name and fields")


def _build_chain(where: Location, registry: Registry) -> object:
    """Build a chain of compressors, each of which holds the next."""
    *outer, last = (where.child(place) for place in range(len(where.value)))
    held = build_component(Kind.COMPRESSOR, last, registry)
    for place in reversed(outer):
        reference = _component_reference(Kind.COMPRESSOR, place)
        held = build_reference(Kind.COMPRESSOR, reference, registry, compressor=held)
    return held


def build_reference(kind: Kind, reference: Reference, registry: Registry, **given: object) -> Any:
    """Build the component that a reference names.

    Args:
        kind: the component's kind.
        reference: the component's name and arguments.
        registry: the registry that knows it.
        given: fields that are built already, by name.

    Raises:
        ConfigError: no such component, or a field it cannot have.
        MissingPluginError: the plugin that it comes from cannot be loaded.
    """
    try:
        component = registry.resolve(kind, reference.name)
    except ConfigError as error:
        raise reference.name_location.wrap(error) from error
    names = [field.name for field in dataclasses.fields(component)]
    for name in given:
        if name not in names:
            raise reference.name_location.error(
                f"{reference.name} cannot contain a {name}: put {reference.name} last in the list"
            )
    fields = dataclasses.replace(reference.where, value=reference.arguments)
    return build_record(component, fields, registry, **given)


def build_record(record: type[T], where: Location, registry: Registry, **given: object) -> T:
    """Build a frozen dataclass from the mapping at a place.

    Args:
        given: fields that are not configuration, by name.

    Raises:
        ConfigError: not a mapping, an unknown or missing key, a wrong type or a value that the dataclass
            refuses.
    """
    return construct(record, where, {**read_fields(record, where, registry, given), **given})


def read_fields(record: type, where: Location, registry: Registry, skip: Collection[str] = ()) -> Tree:
    """Return the checked values of a dataclass's fields that stand in the mapping at a place.

    Args:
        skip: fields that are not read here, and not allowed in the mapping.

    Raises:
        ConfigError: not a mapping, an unknown or missing key, or a wrong type.
    """
    fields = {f.name: f for f in dataclasses.fields(record) if f.init and f.name not in skip}
    if not isinstance(where.value, Mapping):
        raise where.error(f"got {where.given}", f"a mapping of {', '.join(fields)}")
    where.check_keys(list(fields))
    hints = _type_hints(record)
    values = {}
    for name, field in fields.items():
        if name in where.value:
            values[name] = _read_field(hints[name], where.child(name), registry)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise where.child(name).error("missing", _allowed(hints[name], registry))
    return values


@cache
def _type_hints(record: type) -> dict[str, Any]:
    """Return the types of a class's fields; their evaluation takes a quarter of a composition's time."""
    return typing.get_type_hints(record)


def construct(record: type[T], where: Location, values: TreeView) -> T:
    """Make a dataclass of checked values, and add the place to an error of its `__post_init__`.

    A ValueError whose first word is a field's name is placed at that field.

    Raises:
        ConfigError: the dataclass refuses the values.
    """
    try:
        return record(**values)
    except ValueError as error:
        word = str(error).partition(" ")[0].rstrip(":,")
        place = where.child(word) if word in values else where
        raise place.error(str(error)) from error


def component_name(component: object, registry: Registry | None = None) -> str:
    """Return a component's name in configs.

    Raises:
        TypeError: the object is no component.
    """
    kind = kind_of_hint(type(component))
    if kind is None:
        raise TypeError(f"{component!r} is not a component")
    return (registry or default_registry()).name_of(kind, type(component))


def describe(value: object, registry: Registry | None = None) -> Any:
    """Return components, records and values as plain configuration, complete with defaults.

    Args:
        value: a component, a record or a plain value.
        registry: the registry with the components' names; by default the process's.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = {} if kind_of_hint(type(value)) is None else {"name": component_name(value, registry)}
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return name | {field: describe(getattr(value, field), registry) for field in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: describe(v, registry) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [describe(v, registry) for v in value]
    return value


def telling_fields(component: object) -> Tree:
    """Return a component's numbers, and its other fields that are not at their defaults.

    Returns:
        Plain configuration by field, as of `describe`.
    """
    plain = describe(component)
    shown = {}
    for field in dataclasses.fields(component):  # type: ignore[arg-type]
        value = getattr(component, field.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        made = field.default_factory is not dataclasses.MISSING and value == field.default_factory()
        if field.init and (is_number or not (made or value == field.default)):
            shown[field.name] = plain[field.name]
    return shown


def _read_field(hint: object, where: Location, registry: Registry) -> object:
    inner, nullable = optional(hint)
    if where.value is None and nullable:
        return None
    kind = kind_of_hint(inner)
    if kind is not None:
        component = build_component(kind, where, registry)
        return None if nullable and component_name(component, registry) == _NONE else component
    if inner is Reference:
        return Reference.read(where, REFERENCE)
    if typing.get_origin(inner) is tuple and _stands_alone(each := typing.get_args(inner)[0]):
        if not isinstance(where.value, list):
            kind = kind_of_hint(each)
            allowed = REFERENCE if kind is None else f"a {kind}: {_allowed(each, registry)}"
            raise where.error(f"got {where.given}", f"a list; each item is {allowed}")
        places = range(len(where.value))
        return tuple(_read_field(each, where.child(place), registry) for place in places)
    if dataclasses.is_dataclass(inner) and isinstance(inner, type):
        return build_record(inner, where, registry)
    unit = unit_of_key(str(where.path[-1])) if inner is float and isinstance(where.value, str) else ""
    return _read_quantity(hint, unit, where) if unit else read_value(hint, where)


def _read_quantity(hint: object, unit: str, where: Location) -> float:
    """Return the number that a text means, with a unit or without, as ${oc.env:NAME} gives it."""
    with contextlib.suppress(ValueError):
        return float(where.value)
    try:
        return bits_per_second(where.value) if unit is BITS else seconds(where.value)
    except ValueError as error:
        raise where.error(f"got {where.given}", f"{allowed_by(hint)}, or {unit}") from error


def _stands_alone(hint: object) -> bool:
    return hint is Reference or kind_of_hint(hint) is not None


def _allowed(hint: object, registry: Registry) -> str:
    kind = kind_of_hint(optional(hint)[0])
    return allowed_by(hint) if kind is None else ", ".join(registry.names(kind))
