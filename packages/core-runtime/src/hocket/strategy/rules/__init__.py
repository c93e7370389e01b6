"""The rules of composition: refusals of meaningless combinations, with alternatives.

A rule looks at one exchange or at a whole strategy and yields refusals. The rules are independent of each
other and of the configuration that a strategy came from.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.strategy.rules.of_exchanges import EXCHANGE_RULES
from hocket.strategy.rules.of_outer import OUTER_RULES
from hocket.strategy.rules.of_slots import SLOT_RULES
from hocket.strategy.rules.refusal import Refusal
from hocket.strategy.strategy import Strategy

__all__ = ["Refusal", "refusals"]


def refusals(strategy: Strategy) -> Iterator[Refusal]:
    """Yield all faults of a strategy; none if it can be run."""
    for exchange in strategy.exchanges:
        for exchange_rule in (*EXCHANGE_RULES, *OUTER_RULES):
            yield from exchange_rule(exchange)
    for slot_rule in SLOT_RULES:
        yield from slot_rule(strategy)
