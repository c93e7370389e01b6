"""Refusals of strategies, with the names of their parts."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.config.component import component_name, telling_fields
from hocket.strategy.exchange import Exchange


@dataclass(frozen=True)
class Refusal:
    """A refusal of a strategy: the field at fault and the reason.

    Attributes:
        key: the exchange and field at fault, for instance `gradients.0.overlap`.
        reason: the fault, and the nearest thing that works.
    """

    key: str
    reason: str


def refuse(exchange: Exchange, field: str, reason: str) -> Refusal:
    """Return a refusal of one field of an exchange."""
    return Refusal(f"{exchange.name}.{field}", reason)


def title_of(component: object) -> str:
    """Return a component's name as in a config, with its fields: `allreduce`, `bytes (size_mb: 25.0)`."""
    fields = ", ".join(f"{key}: {_plain(value)}" for key, value in telling_fields(component).items())
    return component_name(component) + (f" ({fields})" if fields else "")


def flow(component: object) -> str:
    """Return a component as in a config, on one line: `{name: group, size: 4}`."""
    fields = telling_fields(component)
    name = component_name(component)
    return (
        f"{{name: {name}, {', '.join(f'{k}: {_plain(v)}' for k, v in fields.items())}}}" if fields else name
    )


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_plain(inner)}' for key, inner in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
