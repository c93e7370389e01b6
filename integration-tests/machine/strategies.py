"""The strategies that are tried: as users write them, and by the definitions of what they do.

Definitions are plain formulas over the ranks, [n, n] mixing matrices among them; only where random draws make a
matrix, its topology is asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.plugin import default_registry
from hocket.plugin.kinds import Kind

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Sparse:
    """Gradients of which each rank sends, layer by layer, the largest; what it does not send joins the next ones."""

    density: float


@dataclass(frozen=True)
class Mixing:
    """Parameters x that become W x after a step.

    Attributes:
        matrix: W for (ranks, round, layer).
        every: in each how manieth step.
        delayed: whether W x - x is added one step late.
        pushes: whether models compute with x / w, where w becomes W w, from 1.
        is_fair: whether all w stay 1.
        hidden: whether they are exchanged when the next forward begins, with all that was done to them until then.
        layered: whether each layer is exchanged on its own; else all of them are layer 0.
        outer: lr and momentum of a Nesterov step of outer parameters phi by the ranks' mean of phi - x; None for W x.
    """

    matrix: Callable[[int, int, int], Matrix]
    every: int = 1
    delayed: bool = False
    pushes: bool = False
    is_fair: bool = False
    hidden: bool = False
    layered: bool = False
    outer: tuple[float, float] | None = None


@dataclass(frozen=True)
class Rule:
    """A strategy's part in a step.

    Attributes:
        gradients: mean; Sparse; or None, where each rank steps with its own.
        parameters: what becomes of them afterwards.
    """

    gradients: str | Sparse | None = None
    parameters: Mixing | None = None

    @property
    def keeps_equal(self) -> bool:
        """True if replicas that begin equal stay so."""
        return self.gradients is not None or self.parameters is EVERY_STEP


@dataclass(frozen=True)
class Entry:
    """A strategy.

    Attributes:
        config: what `hocket.attach` is given.
        rules: by the step from which on they hold.
    """

    config: Mapping[str, Any] = field(hash=False)
    rules: Mapping[int, Rule] = field(hash=False)

    def at(self, step: int) -> Rule:
        return self.rules[max(start for start in self.rules if start <= step)]


def everyone(ranks: int, round: int, layer: int) -> Matrix:
    return np.full((ranks, ranks), 1 / ranks)


def ring(ranks: int, round: int, layer: int) -> Matrix:
    """Give one's neighbours and oneself the same weight, each rank counted once."""
    matrix = np.eye(ranks)
    for rank in range(ranks):
        met = {rank, (rank + 1) % ranks, (rank - 1) % ranks}
        matrix[rank, list(met)] = 1 / len(met)
    return matrix


def exponential(ranks: int, round: int, layer: int) -> Matrix:
    """Keep half, and give half to the rank that is 2^h ahead, with h = round mod ceil(log2 n)."""
    hops = (ranks - 1).bit_length()
    if not hops:
        return np.eye(1)
    shift = np.roll(np.eye(ranks), 1 << (round % hops), axis=0)
    return (np.eye(ranks) + shift) / 2


def drawn(topology: str, **settings: Any) -> Callable[[int, int, int], Matrix]:
    def matrix(ranks: int, round: int, layer: int) -> Matrix:
        found: Matrix = _topology(topology)(**settings).mixing_matrix(ranks, round, layer)
        return found

    return matrix


def _topology(name: str) -> Any:
    return default_registry().resolve(Kind.TOPOLOGY, name)


def rotated(ranks: int, round: int, layer: int) -> Matrix:
    """GossipGraD's dissemination, with other partners in each block of rounds."""
    dissemination = _topology("gossipgrad.dissemination")()
    found: Matrix = _topology("gossipgrad.rotated")(dissemination).mixing_matrix(ranks, round, layer)
    return found


def layered_gossip(topology: Any, **collective: Any) -> dict[str, Any]:
    """Return the slot of recipes that mix each layer on its own, overlapped with the next forward."""
    gossip = {"name": "gossip", **collective}
    exchange = {"collective": gossip, "topology": topology, "segments": "layers", "overlap": "forward"}
    return {"parameters": [exchange]}


EVERY_STEP = Mixing(everyone)
GROUP, LEADERS = {"name": "group", "size": 2}, {"name": "leaders", "size": 2}
FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.1}}

SLOTS: dict[str, dict[str, Any]] = {
    "sgd": {"gradients": [{"collective": "allreduce"}]},
    "agd": {"gradients": [{"collective": "allreduce", "segments": "layers", "overlap": "backward"}]},
    "hierarchical_sgd": {
        "gradients": [
            {"collective": "allreduce", "over": GROUP, "overlap": "backward"},
            {"collective": "allreduce", "over": LEADERS},
            {"collective": "broadcast", "over": GROUP},
        ]
    },
    "feedback": {
        "gradients": [{"collective": "sparse_allreduce", "compressor": FEEDBACK, "segments": "layers"}]
    },
    "periodic_average": {"parameters": [{"collective": "allreduce", "every": 2}]},
    "every_step_average": {"parameters": [{"collective": "allreduce"}]},
    "dpsgd": {"parameters": [{"collective": "gossip", "topology": "ring"}]},
    "dpsgd_hidden": {
        "parameters": [
            {"collective": "gossip", "topology": "ring", "segments": "layers", "overlap": "forward"}
        ]
    },
    "sgp": {"parameters": [{"collective": {"name": "gossip", "push_sum": True}, "topology": "exponential"}]},
    "overlap_sgp": {
        "parameters": [
            {
                "collective": {"name": "gossip", "push_sum": True},
                "topology": "exponential",
                "delay": 1,
            }
        ]
    },
    "push_sum": {
        "parameters": [{"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed"}]
    },
    "push_sum_delayed": {
        "parameters": [
            {
                "collective": {"name": "gossip", "push_sum": True},
                "topology": "irregular_directed",
                "delay": 1,
            }
        ]
    },
}

OUTER = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
SLOTS |= {
    "outer": {"parameters": [{"collective": "allreduce", "every": 2, "outer": OUTER}]},
    "outer_delayed": {
        "parameters": [
            {"collective": "allreduce", "every": 2, "delay": 1, "segments": "layers", "outer": OUTER}
        ]
    },
}

# Plugins' recipes.
SLOTS |= {
    "crossover": layered_gossip("crossover.fair_random"),
    "crossover.combo": layered_gossip({"name": "crossover.unfair", "distinct": True}),
    "gossipgrad, its samples at home": layered_gossip(
        {"name": "gossipgrad.rotated", "topology": "gossipgrad.dissemination"}
    ),
    "gossipgrad.random": layered_gossip("gossipgrad.random_push", push_sum=True),
}

RULES: dict[str, Rule] = {
    "sgd": Rule("mean"),
    "agd": Rule("mean"),
    "hierarchical_sgd": Rule("mean"),
    "feedback": Rule(Sparse(0.1)),
    "periodic_average": Rule(None, Mixing(everyone, every=2)),
    "every_step_average": Rule(None, EVERY_STEP),
    "outer": Rule(None, Mixing(everyone, every=2, outer=(0.7, 0.9))),
    "outer_delayed": Rule(None, Mixing(everyone, every=2, delayed=True, outer=(0.7, 0.9))),
    "dpsgd": Rule(None, Mixing(ring)),
    "dpsgd_hidden": Rule(None, Mixing(ring, hidden=True)),
    "sgp": Rule(None, Mixing(exponential, pushes=True, is_fair=True)),
    "overlap_sgp": Rule(None, Mixing(exponential, pushes=True, is_fair=True, delayed=True)),
    "push_sum": Rule(None, Mixing(drawn("irregular_directed"), pushes=True)),
    "push_sum_delayed": Rule(None, Mixing(drawn("irregular_directed"), pushes=True, delayed=True)),
}

RULES |= {
    "crossover": Rule(None, Mixing(drawn("crossover.fair_random"), hidden=True, layered=True)),
    "crossover.combo": Rule(
        None, Mixing(drawn("crossover.unfair", distinct=True), hidden=True, layered=True)
    ),
    "gossipgrad, its samples at home": Rule(None, Mixing(rotated, hidden=True, layered=True)),
    "gossipgrad.random": Rule(
        None, Mixing(drawn("gossipgrad.random_push"), pushes=True, hidden=True, layered=True)
    ),
}

#: After so many steps one follows the other.
PHASE = 3
PHASES = [
    ("sgd", "dpsgd"),
    ("dpsgd", "sgd"),
    ("feedback", "agd"),
    ("overlap_sgp", "feedback"),
    ("push_sum", "sgd"),
    ("dpsgd_hidden", "hierarchical_sgd"),
    ("agd", "push_sum_delayed"),
    ("feedback", "dpsgd"),
    ("sgd", "outer"),
    ("outer_delayed", "agd"),
    ("outer", "outer_delayed"),
    ("push_sum", "outer"),
    ("crossover", "sgd"),
    ("gossipgrad.random", "agd"),
]

STRATEGIES: dict[str, Entry] = {name: Entry(SLOTS[name], {0: RULES[name]}) for name in SLOTS}
STRATEGIES |= {
    f"{first}, then {second}": Entry(
        {**SLOTS[first], "phases": {PHASE: {"gradients": [], "parameters": [], **SLOTS[second]}}},
        {0: RULES[first], PHASE: RULES[second]},
    )
    for first, second in PHASES
}
