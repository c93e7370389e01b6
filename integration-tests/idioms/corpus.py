"""Finds the programs and the strategies that they are run with, and performs them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from matrix import is_repeatable, recipes, shorter_periods
from torch import Tensor

import hocket
from hocket.errors import AttachError, CompositionError
from hocket.strategy import Placement, Strategy
from idioms.side import Ended, Program, Side

#: What longer periods are replaced by: a program makes 6 steps or more, and fragments need a step each.
_PERIODS = (3, 8)


def _sparse(compressor: Any) -> dict[str, Any]:
    return {"gradients": [{"collective": "sparse_allreduce", "compressor": compressor}]}


_TOP_K = {"name": "error_feedback", "compressor": {"name": "topk", "density": 1.0}}

#: Strategies in which every rank steps with the mean gradient of the whole batch, by name.
EXACT: dict[str, Sequence[Any]] = {
    "sgd": ["sgd"],
    "sgd-layers": ["sgd", "gradients.0.segments=layers"],
    "agd": ["agd"],
    "agd-bytes": ["agd", "gradients.0.segments={name: bytes, size_mb: 0.0005}"],
    "hierarchical_sgd": ["hierarchical_sgd"],
    "topk-1": [_sparse(_TOP_K)],
    "momentum-1": [_sparse({"name": "momentum_correction", "masking": False, "compressor": _TOP_K})],
    "redsync": ["redsync"],  # nothing is compressed, as all parameters are small
    "redsync-1": [
        "redsync",
        "gradients.0.compressor.density=1.0",
        "gradients.0.compressor.dense_below_kb=0",
        "gradients.0.compressor.masking=false",
    ],
}

#: Every recipe whose ranks hold whole models.
RECIPES = [name for name in recipes() if not name.startswith("eapipe")]


def names() -> list[str]:
    """Return the names of all programs."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if "\ndef train(" in p.read_text())


@cache
def program(name: str) -> ModuleType:
    """Import a program, with torch's types and generator left as they are."""
    return importlib.import_module(f"idioms.{name}")


@cache
def needs(name: str) -> list[str]:
    """Return the packages that a program needs beyond Hocket's, without importing it."""
    text = (Path(__file__).parent / f"{name}.py").read_text()
    written = re.search(r"^NEEDS = \((.*)\)$", text, re.M)
    return re.findall(r'"(\w+)"', written[1]) if written else []


def missing(name: str) -> list[str]:
    """Return those of them that are not installed."""
    return [word for word in needs(name) if importlib.util.find_spec(word) is None]


def skipped(name: str) -> int:
    """Return how many steps a program's GradScaler leaves out."""
    return int(getattr(program(name), "SKIPPED", 0))


def has_exact(name: str, chosen: str) -> bool:
    """Return whether a program's mean over ranks is the whole batch's.

    Where a compressor takes over the momentum, what works on `p.grad` finds the momentum in it.
    """
    takes = any(
        each.compressor is not None and each.compressor.traits.applies_optimizer_terms
        for each in strategy(chosen).gradients
    )
    return getattr(program(name), "EXACT", True) and not (takes and getattr(program(name), "EDITS", False))


@cache
def strategy(name: str) -> Strategy:
    """Compose an exact strategy, or a recipe with periods that programs reach."""
    if name in EXACT:
        return hocket.compose(*EXACT[name])
    for period in _PERIODS:
        shorter = [re.sub("=.*", f"={period}", each) for each in shorter_periods(name, period)]
        with contextlib.suppress(CompositionError):
            return hocket.compose(name, *shorter)
    raise AssertionError(f"{name} takes none of the periods")


def fits(name: str, ranks: int) -> bool:
    try:
        strategy(name).check_size(Placement.on_one_host(ranks))
    except CompositionError:
        return False
    return True


def changes_alone(name: str) -> bool:
    """Return whether a strategy makes of one rank's gradients and parameters something else than they are."""
    exchanges = strategy(name).exchanges
    compressors = [each.compressor for each in exchanges if each.compressor is not None]
    return any(each.outer is not None for each in strategy(name).parameters) or any(
        compressor.traits.transforms for compressor in compressors
    )


def keeps_frozen(name: str) -> bool:
    """Return whether what is frozen in mid-training stays: not where replicas go on being averaged."""
    return strategy(name).keeps_replicas_equal(Placement.on_one_host(2)) and not changes_alone(name)


def drawn_for(name: str, of: Sequence[str], count: int, ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Draw strategies and numbers of ranks for a program, the same in every run; all where `count` is 0."""
    ways = [(each, size) for each in of for size in ranks if fits(each, size)]
    return random.Random(name).sample(ways, count) if count else ways


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Let other packages warn of what they like."""
    with warnings.catch_warnings():
        if needs(name):
            warnings.simplefilter("ignore")
        yield


@cache
def ends_alone(name: str) -> Ended:
    """Carry a program out in one process, without Hocket."""
    with _quiet(name):
        return Side().run(program(name).train)


def perform(
    name: str, chosen: str, ranks: int, folder: Path | None = None, stops: int | None = None
) -> list[Ended] | str:
    """Carry a program out on virtual ranks; return how each has ended, or why the strategy cannot be attached.

    Where a strategy would take over the momentum of an optimizer that has another, it is left to the optimizer, as the
    message says.
    """
    train: Program = program(name).train
    with _quiet(name):
        try:
            return hocket.virtual(ranks).run(lambda: Side(strategy(chosen), folder, stops).run(train))
        except AttachError as error:
            other = offered(chosen, error)
            if other is None:
                return str(error)
        return hocket.virtual(ranks).run(lambda: Side(other, folder, stops).run(train))


def offered(chosen: str, error: AttachError) -> Strategy | None:
    """Return the strategy with what a message says that works, where it does: it is one message for all ranks."""
    words = re.search(r"use SGD, or (\S+=.*)", str(error))
    return hocket.compose(strategy(chosen).resolved(), words[1]) if words else None


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return by how much numbers differ at most, relative to the largest of each tensor, and at least to 1."""
    assert found.keys() == expected.keys()
    most = 0.0
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        size = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        most = max(most, float((found[name] - tensor).abs().max()) / size if tensor.numel() else 0.0)
    return most


def is_deterministic(name: str) -> bool:
    return is_repeatable(strategy(name))


def is_finite(told: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in told.values())
