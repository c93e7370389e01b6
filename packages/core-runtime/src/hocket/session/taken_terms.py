"""Optimizers whose terms a strategy's compressors cannot take over, refused with the override that leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from hocket.compressor.optimizer_terms import optimizer_terms
from hocket.config.component import component_name
from hocket.errors import AttachError
from hocket.strategy.exchange import Exchange
from hocket.strategy.rules.refusal import flow
from hocket.strategy.strategy import Strategy

__all__ = ["check_taken_terms"]


def check_taken_terms(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has not what a compressor of the strategy, or of a phase of it, takes over.

    Raises:
        AttachError: names the compressor's key, and what to use.
    """
    for place, exchange in _exchanges(strategy):
        if not exchange.compressor.takes:
            continue
        try:
            optimizer_terms(optimizer)
        except AttachError as error:
            key = f"{place}{exchange.name}.compressor"
            other = exchange.compressor.without_taking()
            advice = "" if other.takes else f", or {_override(key, exchange.compressor, other)}"
            raise AttachError(f"{key}: by {component_name(exchange.compressor)} {error}{advice}") from error


def _exchanges(strategy: Strategy) -> Iterator[tuple[str, Exchange]]:
    """Yield all exchanges of gradients, those of phases that are others than before with where a config has them."""
    yield from (("", exchange) for exchange in strategy.gradients)
    before = strategy
    for phase in strategy.phases:
        for exchange in phase.strategy.gradients:
            if exchange not in before.gradients:
                yield f"phases.{phase.step}.", exchange
        before = phase.strategy


def _override(key: str, given: Any, wanted: Any) -> str:
    """Return `KEY=VALUE` that makes one component the other, as short as it can be."""
    if type(given) is type(wanted):
        for field in fields(given):
            value, other = getattr(given, field.name), getattr(wanted, field.name)
            if isinstance(other, bool) and value != other:
                return f"{key}.{field.name}={str(other).lower()}"
            if value != other:
                return _override(f"{key}.{field.name}", value, other)
    return f"{key}={flow(wanted)}"
