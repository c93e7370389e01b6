"""Exchanges and chains of compressors written in Python, read and checked as a file's are."""

from __future__ import annotations

from dataclasses import replace

from hocket.collective.api import Collective
from hocket.compressor.api import Compressor
from hocket.config.component import build_component, build_record, describe
from hocket.config.document import Document, Location, Origin
from hocket.plain import TreeView
from hocket.plugin import Kind, default_registry
from hocket.strategy.exchange import Exchange

#: A component as a config writes it.
Written = str | TreeView


def exchange(collective: Collective | Written, **choices: object) -> Exchange:
    """Return an exchange, for `hocket.Strategy(gradients=(...,), parameters=(...,))`.

    Args:
        collective: a component, its name, or a mapping with its name and fields.
        choices: the other keys of an exchange, such as `over`, `compressor`, `segments`, `every`, `overlap`; components
            likewise, other values as in a config.

    Raises:
        ConfigError: a key, a type or a value that is not allowed; names given and allowed.
        MissingPluginError: a plugin that is not installed or does not load.
    """
    where = _location("hocket.Exchange", {"collective": collective, **choices})
    return build_record(Exchange, where, default_registry(), slot="", index=0)


def chain(*compressors: Compressor | Written) -> Compressor:
    """Return nested compressors, given from the outermost to the innermost, which makes the messages.

    Args:
        compressors: components, their names, or mappings with their names and fields:
            `chain("momentum_correction", "error_feedback", {"name": "topk", "density": 0.01})`.

    Raises:
        ConfigError: one of them is no compressor, or one that is not the last takes no inner one.
    """
    where = _location("hocket.chain", list(compressors))
    compressor: Compressor = build_component(Kind.COMPRESSOR, where, default_registry())
    return compressor


def _location(label: str, value: object) -> Location:
    return replace(Document(Origin(label)).root, value=describe(value))
