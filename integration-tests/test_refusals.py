"""Refusals of the slots name the place and the reason, and whoever follows the advice gets on."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml
from matrix import Cell, accepted, asks_topology, everything, refused

from hocket.errors import CompositionError
from hocket.plugin import Kind
from hocket.strategy import Overlap, compose

SLOTS = ("gradients", "parameters")
REFUSED = {**refused("gradients"), **refused("parameters")}

#: Pairs of core, powersgd and adpsgd that mean something over the world: collective, topology and compressor.
MEANINGFUL = {
    "gradients": (
        "allreduce*-*none",
        "allreduce*-*shared_random",
        "allreduce*-*powersgd",
        "sparse_allreduce*",
        "gossip*-[!i]*-*",  # by a matrix that keeps the mean: all but irregular_directed
    ),
    "parameters": (
        "allreduce*-none",
        "allreduce*-shared_random",
        "broadcast-none",
        *(f"gossip*-[!i]*-{compressor}" for compressor in ("none", "fp16", "bf16", "shared_random")),
        "gossip+push_sum-irregular_directed-none",
        "adpsgd.pair_average-*-none",  # two values that meet half-way, whatever the matrix
    ),
}

#: Collectives that send again what depends on a sum.
ANSWERING = ("gradients-allreduce-", "gradients-allreduce+auto-")

_KINDS = {
    "collective": Kind.COLLECTIVE,
    "topology": Kind.TOPOLOGY,
    "compressor": Kind.COMPRESSOR,
    "over": Kind.SCOPE,
}


def words(message: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z0-9_.]*[a-z0-9]", message))


@pytest.mark.parametrize("slot", SLOTS)
def test_core_refuses_what_means_nothing_and_nothing_else(slot: str) -> None:
    def of_core(ids: Any) -> set[str]:
        return {name for name in ids if name.endswith("-world") and "." not in name.replace("-adpsgd.", "-")}

    allowed = of_core(cell.id for cell, _ in accepted(slot))
    every = allowed | of_core(refused(slot))
    patterns = [f"{slot}-{pattern}-world" for pattern in MEANINGFUL[slot]]
    meant = {name for name in every if any(fnmatchcase(name, pattern) for pattern in patterns)}
    # Second messages are made of a sum: of what an allreduce alone sends, and none of one sum by messages.
    meant -= {name for name in meant if "powersgd" in name and not name.startswith(ANSWERING)}
    # What is added up has to be told.
    meant -= {name for name in meant if "+scalable-" in name and not name.endswith("-topk-world")}
    assert allowed == meant


def group_of(name: str) -> str:
    """Return the slot and the collective of a cell."""
    return "-".join(name.split("-")[:2])


@pytest.mark.parametrize("group", sorted({*map(group_of, REFUSED)}))
def test_refusals(group: str) -> None:
    """All of a collective in one test, as there are thousands."""
    wrong = []
    for name in (each for each in REFUSED if group_of(each) == group):
        try:
            check(*REFUSED[name])
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def check(cell: Cell, ranks: int, error: CompositionError) -> None:
    """See that a refusal names the place, the reason, what there is, and what works.

    Raises:
        AssertionError: it does not.
    """
    message = str(error)
    if ranks:
        assert re.match(rf"{cell.slot}\.\d does not fit {ranks} ranks: .", message), message
        return
    assert re.match(rf"mapping: {cell.slot}\.\d\.[a-z_]+: .{{20}}", message), message
    known = {each.name for each in everything().components()}
    for listed in re.findall(r"\(([a-z_.]+(?:, [a-z_.]+)*)\)", message):
        assert set(listed.split(", ")) <= known, message
    assert leads_to_what_works(cell, error), f"nothing works of what is advised: {message}"


def leads_to_what_works(cell: Cell, error: CompositionError) -> bool:
    """Follow the advice of a refusal, and of the refusals that come then: a strategy may be wrong in several ways."""
    reached = [(cell.config, error)]
    for _ in range(3):
        following = []
        for config, refusal in reached:
            for tried in advised(config, str(refusal)):
                try:
                    compose(tried)
                except CompositionError as another:
                    following.append((tried, another))
                else:
                    return True
        reached = following
    return False


def advised(config: Any, message: str) -> Iterator[Any]:
    """Yield strategies that do something of what a refusal says, one thing each."""
    # Before the advice stands what is wrong, in which components are named too.
    found = re.match(
        r"mapping: (\w+)\.(\d)\.(\w+): .*: ((?:use|leave|let|add|begin|for instance) .*)", message
    )
    assert found, f"no advice: {message}"
    slot, index, key, text = found.groups()
    exchange = config[slot][int(index)]

    def with_fields(**fields: Any) -> Any:
        changed = copy.deepcopy(config)
        mended = {**exchange, **fields}
        asks = asks_topology(name_of(mended["collective"]))
        mended["topology"] = (mended.get("topology") or "complete") if asks else None
        changed[slot][int(index)] = mended
        return changed

    for field, kind in _KINDS.items():
        for component in everything().names(kind):
            if component in words(text) and component != exchange.get(field):
                given = {"name": component, "size": 2} if component in ("group", "leaders") else component
                yield with_fields(**{field: given})
    for overlap in Overlap:
        if overlap in words(text) and key == "overlap":
            yield with_fields(overlap=overlap.value)
    if key == "progress" and "inline" in words(text):
        yield with_fields(progress="inline")
    if "push_sum: true" in text:
        yield with_fields(collective={"name": name_of(exchange["collective"]), "push_sum": True})
    for other in SLOTS:
        if other != slot and f"in {other}" in text:
            yield {other: config[slot]}
    if "use it there" in text:
        moved = with_fields(compressor="none")
        moved[slot][0]["compressor"] = exchange[key]
        moved[slot][0]["collective"] = exchange["collective"]
        yield moved
    for flow in re.findall(r"\{.*\}", text):
        added = copy.deepcopy(config)
        added[slot].insert(int(index) + 1, yaml.safe_load(flow))
        yield added


def name_of(component: Any) -> Any:
    return component["name"] if isinstance(component, dict) else component


def test_bad_advice_is_found() -> None:
    """The choices come from the message, so that bad advice is noticed."""
    cell = Cell("", "gradients", {"gradients": [{"collective": "broadcast"}]})
    for advice, works in (("use allreduce", True), ("use broadcast", False), ("begin with a gossip", True)):
        error = CompositionError(f"mapping: gradients.0.collective: broadcast means nothing: {advice}")
        assert leads_to_what_works(cell, error) == works
