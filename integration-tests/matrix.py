"""The cells of the matrix, generated from the registry: a new plugin's recipes and components enter by themselves.

A component is tried with its defaults and with each other value of its switches; one that needs values gets some of
`_CANDIDATES`, and one that holds another component gets every plain one. Not every product of choices is a cell,
but every pair: collectives with compressors, with topologies and with overlaps, and all of these with scopes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import pytest

from hocket.collective.api import Collective, Ends
from hocket.compressor import Compressor
from hocket.compressor.wrapper import Identity
from hocket.errors import CompositionError
from hocket.plugin import Kind, Registry, default_registry
from hocket.plugin.kinds import kind_of_hint
from hocket.strategy import Overlap, Placement, Strategy, compose

RANKS = (4, 6)

#: What longer periods are replaced by: one in which fragments of the toy have steps of their own.
_PERIOD = 8

#: Values for fields that a component does not work without, by type; the first that it takes are used.
_CANDIDATES: dict[type, tuple[Any, ...]] = {int: (2, 1), float: (0.25, 1.0), bool: (True, False)}

#: The toy is small: of a share of it, as top-k sends one, something must be left, and no layer may be too small.
_SHARES = {"density": 0.25, "dense_below_kb": 0.0, "chunk": 8, "k": 2}

Config = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """A component as a config writes it, and what cells call it: its name, and what it is switched to or holds."""

    id: str
    config: Config = dataclasses.field(hash=False, compare=False)

    @property
    def is_switched(self) -> bool:
        return "+" in self.id


@dataclass(frozen=True)
class Cell:
    """A strategy that is tested.

    Attributes:
        id: its slot, collective, topology, compressor, arrangement and overlap.
        slot: gradients or parameters.
        config: as a file would hold it.
    """

    id: str
    slot: str
    config: Mapping[str, Any] = dataclasses.field(hash=False, compare=False)

    @property
    def choices(self) -> tuple[str, ...]:
        """Its collective, topology where there is one, compressor, arrangement and overlap."""
        return tuple(self.id.split("-")[1:])

    def compose(self) -> Strategy:
        return _composed(self)


@cache
def _composed(cell: Cell) -> Strategy:
    return compose(cell.config)


@cache
def everything() -> Registry:
    """Return the registry with every installed plugin loaded."""
    registry = default_registry()
    for word in registry.installed():
        registry.load(word)
    return registry


def recipes(registry: Registry | None = None) -> list[str]:
    return [recipe.name for recipe in (registry or everything()).recipes()]


def full_but(names: list[str], every: int) -> list[Any]:
    """Return parameters of a test: the first of so many names, and each further one for the full set alone."""
    return [
        pytest.param(name, marks=pytest.mark.full if number % every else [])
        for number, name in enumerate(names)
    ]


def shorter_periods(recipe: str, steps: int) -> list[str]:
    """Return overrides that give a recipe's exchanges a shorter period where `steps` do not reach the recipe's."""
    long = [exchange for exchange in compose(recipe).parameters if exchange.period(max(RANKS)) > steps]
    return [f"{exchange.name}.every={_PERIOD}" for exchange in long]


def sized_recipes() -> list[tuple[str, int]]:
    """Return the recipes with each number of ranks that they are defined for."""
    return [(name, ranks) for name in recipes() for ranks in RANKS if _fits(compose(name), ranks) is None]


def is_repeatable(strategy: Strategy) -> bool:
    """Return whether two runs give the same bits, and send as many bytes as planned.

    Nothing then depends on when ranks arrive at a round, or on measured costs.
    """
    return not any(_depends_on_time(exchange.collective) for exchange in strategy.exchanges)


def _depends_on_time(collective: Collective) -> bool:
    traits = collective.traits
    measures = getattr(collective, "algorithm", None) == "auto" or getattr(collective, "auto", False)
    return (traits.needs_thread and not traits.equal_result) or (
        measures and getattr(collective, "costs", None) is None
    )


def _fits(strategy: Strategy, ranks: int) -> CompositionError | None:
    """Return why a strategy is not defined for so many ranks, None where it is."""
    try:
        strategy.check_size(Placement.on_one_host(ranks))
    except CompositionError as error:
        return error
    return None


def gossip_recipes() -> list[str]:
    """Return the recipes in which parameters, and not distances from outer ones, are mixed as a topology says."""
    names = ((name, compose(name)) for name in recipes())
    return [
        name
        for name, strategy in names
        if any(
            e.topology and e.outer is None and e.collective.traits.ends is not Ends.OPEN
            for e in strategy.parameters
        )
    ]


def asks_topology(collective: str, registry: Registry | None = None) -> bool:
    return bool(example_of(Kind.COLLECTIVE, collective, registry).traits.needs_topology)


# --- components ------------------------------------------------------------------------------------------


def choices(kind: Kind, registry: Registry | None = None) -> list[Choice]:
    """Return the components of a kind that hold no other of it, each with every switch it has.

    Raises:
        LookupError: names a component for which no values were found that it takes.
    """
    registry = registry or everything()
    names = [name for name in registry.names(kind) if _held(registry.resolve(kind, name)) is None]
    return [choice for name in names for choice in _switched(name, registry.resolve(kind, name), {})]


def wrapped(registry: Registry | None = None) -> list[Choice]:
    """Return compressors that hold a compressor: each around every plain one, and around those that it takes."""
    registry = registry or everything()
    wrappers = {name: registry.resolve(Kind.COMPRESSOR, name) for name in registry.names(Kind.COMPRESSOR)}
    wrappers = {name: cls for name, cls in wrappers.items() if _held(cls) is not None}
    plain = [choice for choice in choices(Kind.COMPRESSOR, registry) if not choice.is_switched]
    found = [c for inner in plain for c in _around(wrappers, inner, registry)]
    # What corrects momentum is meant around what feeds errors back: a second layer, around sparse messages only.
    twice = [c for c in found if c.id.endswith("+topk")]
    return found + [c for inner in twice for c in _around(wrappers, inner, registry)]


def _around(wrappers: Mapping[str, type], inner: Choice, registry: Registry) -> Iterator[Choice]:
    for name, wrapper in wrappers.items():
        held = _held(wrapper)
        assert held is not None
        given = {held: _built(Kind.COMPRESSOR, inner.config, registry)}
        if not _takes(wrapper, _example(name, wrapper, {held: Identity()}), given):
            continue  # refused by the component itself, in whatever strategy
        for choice in _switched(name, wrapper, {held: Identity()}):
            yield Choice(f"{choice.id}+{inner.id}", {**choice.config, held: inner.config})


def example_of(kind: Kind, name: str, registry: Registry | None = None) -> Any:
    """Build the component of that name, with what it needs and around the first component that it takes.

    Raises:
        LookupError: no values were found that it takes.
    """
    registry = registry or everything()
    component = registry.resolve(kind, name)
    held = _held(component)
    if held is None:
        return component(**_example(name, component, {}))
    for inner in choices(kind, registry):
        given = {held: _built(kind, inner.config, registry)}
        with contextlib.suppress(LookupError):
            return component(**_example(name, component, given), **given)
    raise LookupError(f"{name}: no {kind} was found that it takes")


def _built(kind: Kind, config: Config, registry: Registry) -> Any:
    fields = {
        key: _built(kind, value, registry) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "name"
    }
    return registry.resolve(kind, config["name"])(**fields)


def _switched(name: str, component: type, given: Config) -> Iterator[Choice]:
    """Yield a component with the fields that it needs, and then with each switch set otherwise."""
    example = _example(name, component, given)
    yield Choice(name, {"name": name, **example})
    for field, hint in _fields(component):
        if field.name in {**example, **given} or not (hint is bool or _is_enum(hint)):
            continue
        for value in (True, False) if hint is bool else hint:
            if value != field.default:
                told = (field.name if value else f"no_{field.name}") if hint is bool else str(value)
                plain = value.value if isinstance(value, Enum) else value
                yield Choice(f"{name}+{told}", {"name": name, **example, field.name: plain})


def _example(name: str, component: type, given: Config) -> Config:
    """Return fields with which, beside the given ones, a component can be built."""
    fields = {field.name: (field, hint) for field, hint in _fields(component) if field.name not in given}
    shares = {key: share for key, share in _SHARES.items() if key in fields}
    needed = {key: hint for key, (field, hint) in fields.items() if _is_required(field)}
    optional = {key: hint for key, (field, hint) in fields.items() if not _is_required(field)}
    # Alone, or with one more where it refuses all to be left out.
    for extra in ({}, *({key: hint} for key, hint in optional.items())):
        tried = {**needed, **extra}
        for values in itertools.product(*(_candidates(hint) for hint in tried.values())):
            example = {**shares, **dict(zip(tried, values, strict=True))}
            if _takes(component, example, given):
                return example
    raise LookupError(
        f"{name}: no values were found that it can be built from: give its fields defaults, or add to _CANDIDATES"
    )


def _takes(component: type, example: Config, given: Config) -> bool:
    try:
        component(**example, **given)
    except (ValueError, TypeError):
        return False
    return True


def _fields(component: type) -> list[tuple[Any, Any]]:
    hints = typing.get_type_hints(component)
    return [(field, hints[field.name]) for field in dataclasses.fields(component) if field.init]


def _is_required(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _candidates(hint: Any) -> tuple[Any, ...]:
    inner = next((arg for arg in typing.get_args(hint) if arg is not type(None)), hint)
    return tuple(inner) if _is_enum(inner) else _CANDIDATES.get(inner, ())


def _held(component: type) -> str | None:
    """Return the field in which a component holds another of its kind."""
    kind = kind_of_hint(component)
    names = (field.name for field, hint in _fields(component) if kind_of_hint(hint) is kind)
    return next(names, None)


# --- cells -----------------------------------------------------------------------------------------------


def _hierarchies(exchange: Config, slot: str) -> dict[str, list[Config]]:
    """Return the arrangements of several exchanges in which one is tried, in the groups or among their leaders."""
    group, leaders = ({"name": name, "size": 2} for name in ("group", "leaders"))
    uneven, uneven_leaders = ({"name": name, "size": 4} for name in ("group", "leaders"))
    sharded, sharded_leaders = {**group, "sharded": True}, {**leaders, "sharded": True}

    def then(collective: str, over: Config) -> Config:
        return {"collective": collective, "over": over, "segments": exchange["segments"]}

    before = [then("allreduce", group)] if slot == "gradients" else []
    before_sharded = [then("allreduce", sharded)] if slot == "gradients" else []
    return {
        "hierarchy": [
            {**exchange, "over": group},
            then("allreduce", leaders),
            then("broadcast", group),
        ],
        "uneven": [
            {**exchange, "over": uneven},
            then("allreduce", uneven_leaders),
            then("broadcast", uneven),
        ],
        "leaders": [*before, {**exchange, "over": leaders}, then("broadcast", group)],
        "sharded_leaders": [
            *before_sharded,
            {**exchange, "over": sharded_leaders},
            then("broadcast", sharded),
        ],
    }


@dataclass(frozen=True)
class _Pair:
    """A combination to try, and the ways to try it in.

    Attributes:
        overlapped: true: with every overlap.
        everywhere: true: in every scope.
        threaded: true: with a progress thread.
    """

    collective: Choice
    topology: Choice | None
    compressor: Choice
    overlapped: bool
    everywhere: bool
    threaded: bool

    @property
    def id(self) -> str:
        return "-".join(each.id for each in (self.collective, self.topology, self.compressor) if each)

    @property
    def config(self) -> Config:
        topology = {} if self.topology is None else {"topology": self.topology.config}
        return {
            "collective": self.collective.config,
            **topology,
            "compressor": self.compressor.config,
            "segments": "layers",
        }


def _pairs(slot: str, registry: Registry) -> Iterator[_Pair]:
    topologies = choices(Kind.TOPOLOGY, registry)
    plain, wrappers = choices(Kind.COMPRESSOR, registry), wrapped(registry)
    main = _first_of_relatives(plain, registry)
    for collective in choices(Kind.COLLECTIVE, registry):
        asks = asks_topology(collective.config["name"], registry)
        for topology in topologies if asks else [None]:
            first = topology in (None, topologies[0])
            for compressor in (*plain, *wrappers):
                if _meet(slot, collective, first, compressor, compressor in plain):
                    yield _pair(slot, collective, topology, first, compressor, compressor in main)


def _meet(slot: str, collective: Choice, first: bool, compressor: Choice, is_plain: bool) -> bool:
    """Return whether a pair is tried: every compressor with each collective and, in parameters, each topology.

    What a collective is switched to meets all topologies, and otherwise what is plain.
    """
    if first and not collective.is_switched:
        return True
    if compressor.is_switched or not is_plain:
        return False
    one_is_enough = (slot == "gradients" or collective.is_switched) and not first
    return compressor.id == "none" if one_is_enough else True


def _first_of_relatives(plain: list[Choice], registry: Registry) -> list[Choice]:
    """Return of compressors that share a base, as casts do, the first: in how they travel they are alike."""
    first: dict[type, Choice] = {}
    for choice in plain:
        bases = registry.resolve(Kind.COMPRESSOR, choice.config["name"]).__mro__
        first.setdefault(bases[bases.index(Compressor) - 1], choice)
    return list(first.values())


def _pair(
    slot: str, collective: Choice, topology: Choice | None, first: bool, compressor: Choice, is_main: bool
) -> _Pair:
    """Arrange a pair; `is_main` are compressors that are tried in every way."""
    keeps_residual = compressor.id.startswith("error_feedback+")
    overlapped = (is_main and (first or slot == "parameters")) or compressor.id.endswith("+topk")
    everywhere = (is_main or keeps_residual) and first and not collective.is_switched
    if slot == "gradients" and topology is not None:
        everywhere = everywhere and compressor.id in ("none", "topk")
    return _Pair(collective, topology, compressor, overlapped, everywhere, threaded=is_main and first)


def families(slot: str, registry: Registry | None = None) -> Iterator[list[Cell]]:
    """Yield the cells of each pair, those that are refused included: over the world first, then the others."""
    registry = registry or everything()
    others = [scope for scope in choices(Kind.SCOPE, registry) if scope.id != "world"]
    for pair in _pairs(slot, registry):
        alone = pair.config
        arranged = {"world": [alone]}
        for overlap in Overlap if pair.overlapped else ():
            if overlap is not Overlap.NONE:
                arranged[f"world-{overlap}"] = [{**alone, "overlap": overlap.value}]
        if pair.overlapped and slot == "parameters":
            arranged["world-delay"] = [{**alone, "delay": 1}]
        if pair.threaded:
            arranged["world-thread"] = [{**alone, "progress": "thread"}]
        if pair.everywhere:
            arranged |= {scope.id: [{**alone, "over": scope.config}] for scope in others}
            arranged |= _hierarchies(alone, slot)
        yield [
            Cell(f"{slot}-{pair.id}-{key}", slot, {**_shared_before(slot, value, registry), slot: value})
            for key, value in arranged.items()
        ]


def _shared_before(slot: str, exchanges: list[Config], registry: Registry) -> Config:
    """Return what hands gradients on whose ranks' parameters an exchange of parameters would replace."""
    first = exchanges[0]
    if slot == "gradients":
        return {}
    ends = example_of(Kind.COLLECTIVE, first["collective"]["name"], registry).traits.ends
    if ends in {Ends.ROOT, Ends.COPY}:
        return {"gradients": [{"collective": "gossip", "topology": "random_matching"}]}
    if first.get("over", {}).get("name") == "leaders":
        return {"gradients": [{"collective": "allreduce", "over": {**first["over"], "name": "group"}}]}
    return {}


@cache
def _sorted_out(
    slot: str,
) -> tuple[dict[tuple[str, int], Cell], dict[str, tuple[Cell, int, CompositionError]]]:
    """Return the cells that can be run, by id and number of ranks, and the others with their refusals, by id."""
    fit: dict[tuple[str, int], Cell] = {}
    misfit: dict[str, tuple[Cell, int, CompositionError]] = {}
    for family in families(slot):
        for cell in family:
            if family[0].id in misfit and len(cell.config[slot]) == 1:
                continue  # what is refused over the world is so everywhere, unless others follow
            try:
                strategy = cell.compose()
            except CompositionError as error:
                if family[0].id not in misfit:
                    misfit[cell.id] = (cell, 0, error)
                continue
            for ranks in RANKS:
                reason = _fits(strategy, ranks)
                if reason is None:
                    fit[cell.id, ranks] = cell
                else:
                    misfit[f"{cell.id}-{ranks}"] = (cell, ranks, reason)
    return fit, misfit


def accepted(slot: str) -> list[tuple[Cell, int]]:
    """Return the cells that can be run, each with a number of ranks."""
    return [(cell, ranks) for (_, ranks), cell in _sorted_out(slot)[0].items()]


@cache
def tried(slot: str) -> list[tuple[Cell, int]]:
    """Return some of the cells that can be run, each with a number of ranks: all where HOCKET_CELLS is `all`.

    Otherwise as few as needed for each choice to be in one of either slot, and for each collective to meet each word
    that is in a cell of its own. `test_cells.py` draws from the others in each run.
    """
    ways = accepted(slot)
    if os.environ.get("HOCKET_CELLS") == "all":
        return ways
    chosen = []
    unmet = {meeting for way in ways for meeting in _meetings(*way)}
    if slot == "parameters":
        unmet -= {(choice,) for cell, _ in tried("gradients") for choice in cell.choices}
    while unmet:
        way = max(ways, key=lambda way: len(_meetings(*way) & unmet))
        chosen.append(way)
        unmet -= _meetings(*way)
    return chosen


@cache
def _meetings(cell: Cell, ranks: int) -> frozenset[tuple[str, ...]]:
    """Return a cell's choices, and its collective with each word: what holds another, or is switched, is of several."""
    collective, *others = cell.choices
    words = [f"{ranks} ranks", *(word for choice in others for word in choice.split("+"))]
    return frozenset((collective.split("+")[0], word) for word in words) | {
        (choice,) for choice in cell.choices
    }


def refused(slot: str) -> dict[str, tuple[Cell, int, CompositionError]]:
    """Return the cells that cannot be run by id, with the number of ranks that is refused, 0 for any, and why."""
    return _sorted_out(slot)[1]
