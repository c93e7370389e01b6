"""The composition of a strategy from a recipe, a file or a mapping, with refusals of meaningless ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock

from hocket.config.component import build_component, build_record
from hocket.config.document import Document, Location
from hocket.config.phasing import phase_documents
from hocket.config.settings import ROOT_KEYS
from hocket.config.source import SLOTS, Target, load_document, parse_override, run_keys
from hocket.errors import CompositionError, ConfigError
from hocket.plain import flattened
from hocket.plugin import Kind, Registry, default_registry
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Exchange, Overlap
from hocket.strategy.rules import refusals
from hocket.strategy.strategy import Phase, Strategy

#: The key of the number of steps with which a strategy begins synchronously, and the recipe of these steps.
SYNCHRONOUS_STEPS = "synchronous_steps"
SYNCHRONOUS_RECIPE = "agd"

_log = logging.getLogger("hocket")

#: The files of whose other keys this process has warned: virtual ranks are its threads, and say it once.
_warned_of: set[tuple[str, str]] = set()
_telling = Lock()


def compose(target: Target | Strategy, *overrides: str, registry: Registry | None = None) -> Strategy:
    """Compose a strategy.

    Args:
        target: a recipe's name, the path of a YAML file, a mapping with the content of one (OmegaConf's DictConfig is
            one), or a strategy that was made in Python. A file holds a strategy alone (`gradients: [...]`), a recipe,
            or a run's whole configuration, whose other keys a warning names, once in a job.
        overrides: `KEY=VALUE`, applied to the target, those of a key before those of keys within it, for instance
            `parameters.0.topology=ring` or `synchronous_steps=240`.
        registry: the source of components; the installed plugins by default.

    Raises:
        ConfigError: a key, a type or a value that is not allowed; names source, key, given and allowed.
        CompositionError: parts that cannot mean anything together; says what can.
        MissingPluginError: a plugin that is not installed or does not load.
    """
    registry = registry or default_registry()
    if isinstance(target, Strategy):
        target = _as_file(target, registry)
    document = load_document(target, overrides, registry)
    for override in map(parse_override, overrides):
        if override.keys[0] not in ("strategy", "recipe", SYNCHRONOUS_STEPS):
            raise ConfigError(f"{override.origin.label}: {_no_part(override.keys[0], target, registry)}")
    document.root.check_keys((*ROOT_KEYS, *SLOTS))
    name = document.tree.get("name")
    strategy = build_strategy(document, registry, None if name is None else str(name))
    if left := run_keys(target, registry):
        _warn_of_left(str(target), ", ".join(left))
    return strategy


def _no_part(key: str, target: Target, registry: Registry) -> str:
    """Return that a strategy has no such key, and where it has it."""
    keys = flattened(compose(target, registry=registry).resolved(registry))
    places = [each for each in keys if each.rpartition(".")[2] == key]
    guess = f". Did you mean {' or '.join(places)}? Allowed" if places else "; allowed"
    return f"{key} is not a part of a strategy{guess}: {', '.join((*SLOTS, SYNCHRONOUS_STEPS))}"


def _warn_of_left(file: str, keys: str) -> None:
    from hocket.launch.joining import launched_rank

    with _telling:
        if launched_rank() != 0 or (file, keys) in _warned_of:
            return
        _warned_of.add((file, keys))
    _log.warning("%s: only `hocket run` reads %s; in a script, set them in the script", file, keys)


def _as_file(strategy: Strategy, registry: Registry) -> dict[str, object]:
    """Return a strategy in the form of a run's file."""
    plain = strategy.resolved(registry)
    name, phases = plain.pop("name"), plain.pop("phases")
    return {"name": name, "strategy": plain, "phases": phases}


def build_strategy(document: Document, registry: Registry, name: str | None) -> Strategy:
    """Build and check the strategy of a document, with its phases.

    Raises:
        ConfigError, CompositionError, MissingPluginError: as in `compose`.
    """
    phases = tuple(
        Phase(step, _build(changed.root.child("strategy"), registry, name))
        for step, changed in phase_documents(document)
    )
    strategy = replace(_build(document.root.child("strategy"), registry, name), phases=phases)
    return _begun_synchronously(strategy, document.root.child(SYNCHRONOUS_STEPS), registry)


def _begun_synchronously(strategy: Strategy, where: Location, registry: Registry) -> Strategy:
    """Return a strategy whose first steps exchange as recipe `agd` does; what it is then, it is as a phase.

    Raises:
        ConfigError: the number of steps is none.
    """
    steps = 0 if where.value is None else where.value
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise where.error(f"got {where.given}", "a number of steps, 0 or more")
    if steps == 0:
        return strategy
    document = load_document(SYNCHRONOUS_RECIPE, (), registry)
    later = (phase for phase in strategy.phases if phase.step > steps)
    return replace(
        _build(document.root.child("strategy"), registry, strategy.name),
        samples=strategy.samples,
        phases=(Phase(steps, strategy.at(steps)), *later),
    )


def _build(where: Location, registry: Registry, name: str | None) -> Strategy:
    """Build and check the strategy at a place of a document, without phases.

    Raises:
        ConfigError, CompositionError, MissingPluginError: as in `compose`.
    """
    if not isinstance(where.value, Mapping):
        hint = "; only a sweep takes strategy=" if isinstance(where.value, str) else ""
        if hint and "," not in where.value:  # one recipe
            named = f"`hocket run {where.value}`, or write recipe: {where.value} in a file"
            hint = f". To use a recipe, name it first, as in {named}{hint}"
        raise where.error(f"got {where.given}", f"a mapping of {', '.join(SLOTS)}{hint}")
    where.check_keys(SLOTS)
    samples = where.child("samples")
    strategy = Strategy(
        name=name,
        samples=None if samples.value is None else build_component(Kind.SAMPLES, samples, registry),
        gradients=read_slot(GRADIENTS, where.child(GRADIENTS), registry),
        parameters=read_slot(PARAMETERS, where.child(PARAMETERS), registry),
    )
    for refusal in refusals(strategy):
        place = where
        for key in refusal.key.split("."):
            place = place.child(int(key) if key.isdecimal() else key)
        raise place.error(refusal.reason, kind=CompositionError)
    return strategy


def check_composition(strategy: Strategy) -> None:
    """Refuse a strategy made in Python with a meaningless combination, as `compose` refuses a file's.

    Raises:
        CompositionError: a combination is meaningless; says what works.
    """
    for each in strategy.in_turn:
        for refusal in refusals(each):
            raise CompositionError(f"strategy: {refusal.key}: {refusal.reason}")


def read_slot(slot: str, where: Location, registry: Registry) -> tuple[Exchange, ...]:
    """Read the exchanges of a slot, each on its own, without rules about combinations.

    Raises:
        ConfigError, MissingPluginError: as in `compose`.
    """
    if where.value is None:
        return ()
    if not isinstance(where.value, list):
        raise where.error(f"got {where.given}", "a list of exchanges, such as [{collective: allreduce}]")
    places = [where.child(index) for index in range(len(where.value))]
    for place in places:
        _refuse_delayed(place)
        _refuse_part(place, registry)
    return tuple(
        build_record(Exchange, place, registry, slot=slot, index=index) for index, place in enumerate(places)
    )


def _refuse_part(exchange: Location, registry: Registry) -> None:
    """Refuse a list with one key only, and say how a file changes one key of its recipe's exchange."""
    if not isinstance(exchange.value, Mapping) or "collective" in exchange.value:
        return
    known = [key for key in exchange.value if key in Exchange.__dataclass_fields__]
    if known and exchange.document.tree.get("recipe"):
        place = exchange.child(known[0])
        raise exchange.child("collective").error(
            "missing",
            f"{', '.join(registry.names(Kind.COLLECTIVE))}. This list replaces the recipe's whole list of exchanges. "
            f"To change only one key of the recipe's exchange, write this in its place: `{place.key}: {place.given}`",
        )


def _refuse_delayed(exchange: Location) -> None:
    """Refuse an overlap of earlier versions, and say how a config writes it now."""
    overlap = exchange.child("overlap")
    if overlap.value == "delayed":
        allowed = ", ".join(Overlap)
        raise overlap.error("got 'delayed': write `delay: 1, merge: add`, which is the same", allowed)
