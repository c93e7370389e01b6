"""The trainings of `test_islands.py`: on shards, by ranks of torch's, and on whole models, by virtual ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket

SAMPLES = 4
#: Whether `tools/test --full` runs: of products, others try each value once.
IS_FULL = os.environ.get("HOCKET_CELLS") == "all"


class Block(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return h


class Net(nn.Module):
    """A small network with what makes shards awkward.

    Over two ranks the rows of `side` and `head` do not divide, `gate` has an empty shard, the last bias is tied to
    another, one parameter is frozen, and one is never used.

    Args:
        odd: whether it has these; tensor parallelism takes even shards only.
    """

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self.odd = odd
        if odd:
            self.gate, self.side = nn.Linear(8, 1), nn.Linear(7, 7, bias=False)
            self.frozen = nn.Parameter(torch.full((3, 8), 0.5), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(3))
            self.tied = self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.odd:
            x = x * torch.sigmoid(self.gate(x)) + self.frozen.sum(0) * self.tied
            x = torch.cat([self.side(x[:, :7]), x[:, 7:]], 1)
        y: Tensor = self.head(x)
        return y


class Tokens(nn.Module):
    """A model of sequences, whose norms sequence parallelism shards along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(width=16), Block(width=16)])
        # Not `norm`: torch 2.7 takes it for that of blocks, too, when it is told of these.
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        y: Tensor = self.head(self.last(h)).flatten(0, 1)
        return y


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        strategy: arguments of `hocket.compose`.
        shape: sizes of the mesh's dimensions, islands first.
        style: how an island shards the model.
        optimizer: the name of the optimizer.
        steps: number of batches of each share.
        clip: the largest norm; 0 for none.
        accumulate: number of batches that only add up before each that steps.
        uneven: by share, its number of batches, where they differ.
        double: whether it computes in float64.
        seeds: whether islands begin with different values.
        attach: more arguments of `hocket.attach`.
        nan: the share and the step whose batch holds NaN; None for none.
        often: whether it is tried with each change, not in full runs alone.
    """

    strategy: Sequence[Any]
    shape: tuple[int, ...] = (2, 2)
    style: str = "nested"
    optimizer: str = "sgd"
    steps: int = 6
    clip: float = 0.0
    accumulate: int = 0
    uneven: tuple[int, ...] = ()
    double: bool = True
    seeds: bool = False
    attach: dict[str, Any] = field(default_factory=dict)
    nan: tuple[int, int] | None = None
    often: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def shares(self) -> int:
        """Return the number of batches that an island reads in a step."""
        return (
            1
            if self.style in ("tp", "sp")
            else math.prod(self.shape[1:]) // (2 if "fsdp" in self.style else 1)
        )

    @property
    def of_tokens(self) -> bool:
        """Tell whether its model is one of sequences."""
        return self.style.endswith(("sp", "tokens"))


DILOCO = ("diloco", "parameters.0.every=2")

CASES = {
    "sgd": Case(["sgd"]),
    "sgd, root alone": Case(["sgd"], style="root", double=False),
    "sgd, resharded never": Case(["sgd"], style="kept"),
    "sgd, accumulated": Case(["sgd"], accumulate=1),
    "sgd, accumulated without FSDP's messages": Case(
        ["sgd"], accumulate=1, style="nested, no sync", often=True
    ),
    "sgd, uneven": Case(["sgd"], uneven=(6, 6, 6, 4)),
    "sgd, an island with fewer": Case(["sgd"], uneven=(4, 4, 6, 6), often=True),
    "sgd, NaN": Case(["sgd"], nan=(3, 2), attach={"on_nonfinite": "skip"}),
    "agd by layers, clipped": Case(["agd", "gradients.0.segments=layers"], clip=0.05, often=True),
    "agd by bytes, AdamW": Case(
        ["agd", "gradients.0.segments={name: bytes, size_mb: 0.001}"], optimizer="adamw", seeds=True
    ),
    "dpsgd": Case(
        ["dpsgd", "parameters.0.segments=layers"], seeds=True, attach={"initial": "keep"}, often=True
    ),
    "sgp": Case(["sgp"], seeds=True, attach={"initial": "keep"}),
    "overlap_sgp": Case(["overlap_sgp"], often=True),
    "periodic_average": Case(
        ["periodic_average", "parameters.0.every=2"], optimizer="fused", double=False, often=True
    ),
    "diloco": Case(DILOCO, steps=7),
    "diloco, AdamW, clipped": Case(DILOCO, optimizer="foreach", clip=0.05, style="root", steps=5, often=True),
    "diloco, uneven": Case(DILOCO, uneven=(6, 5, 6, 6), clip=0.05, often=True),
    "diloco, NaN": Case(DILOCO, nan=(3, 2), attach={"on_nonfinite": "skip"}),
    "diloco, float32": Case(DILOCO, double=False),
    "diloco.streaming": Case(["diloco.streaming", "parameters.0.every=8"], steps=20, often=True),
    "powersgd": Case(["powersgd"], often=True),
    "redsync": Case(["redsync"]),
    "diloco behind synchronous steps": Case([*DILOCO, "synchronous_steps=3"], steps=8),
    "sgd, tensor parallel": Case(["sgd"], style="tp", clip=0.05, often=True),
    "sgd, sequence parallel": Case(["sgd"], style="sp", clip=0.05, often=True),
    "dpsgd, tensor parallel": Case(["dpsgd"], style="tp"),
    "diloco, tensor parallel": Case(DILOCO, style="tp", optimizer="adamw", often=True),
    # After step 4 nobody moves the second half of the embedding, whose outer momentum goes on with the first half's.
    "diloco, a shard at rest": Case(DILOCO, style="tokens", optimizer="plain", steps=8, often=True),
    "diloco over gloo": Case(DILOCO, attach={"lanes": "gloo"}),
}

PUSH_SUM = {"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed"}
GROUPS = ("gradients.0.over.by=null", "gradients.0.over.size=2")

#: On 8 ranks: four islands that differ, and islands of four ranks.
_BETWEEN_FOUR: dict[str, Sequence[Any]] = {
    "sgd": ["sgd"],
    "dpsgd": ["dpsgd"],
    "diloco": DILOCO,
    "redsync": ["redsync"],
    "sgp": ["sgp"],
    "overlap_sgp": ["overlap_sgp"],
    "push-sum": [{"gradients": [], "parameters": [PUSH_SUM]}],
    "push-sum, delayed": [{"gradients": [], "parameters": [{**PUSH_SUM, "delay": 1}]}],
    "hierarchical_sgd": ["hierarchical_sgd", *GROUPS],
    "diloco.two_level": ["diloco.two_level", *GROUPS, "parameters.0.every=2"],
    "diloco.noloco": ["diloco.noloco", "parameters.0.every=2"],
    "crossover": ["crossover", "parameters.0.overlap=none"],
    "gossipgrad without samples": ["gossipgrad", "samples=null", "parameters.0.overlap=none"],
}
WIDE = {
    f"four islands, {name}": Case(strategy, shape=(4, 2), steps=7) for name, strategy in _BETWEEN_FOUR.items()
}
for kind, sizes in (("hsdp", (2, 2, 2)), ("fsdp tp", (2, 2, 2)), ("fsdp sp", (2, 2, 2)), ("sp", (2, 4))):
    WIDE |= {
        f"{kind}, {name}": Case(strategy, shape=sizes, style=kind, clip=clip, steps=5)
        for name, strategy, clip in (
            ("sgd", ["sgd"], 0.05),
            ("agd", ["agd"], 0.0),
            ("dpsgd", ["dpsgd"], 0.0),
            ("diloco", DILOCO, 0.05),
        )
    }
WIDE["hsdp, uneven"] = Case(["sgd"], shape=(2, 2, 2), style="hsdp", uneven=(6, 6, 6, 4, 5, 6, 6, 6))
WIDE["fsdp tp, uneven"] = Case(["sgd"], shape=(2, 2, 2), style="fsdp tp", uneven=(6, 5, 6, 4))

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def make(case: Case, island: int) -> Net | Tokens:
    torch.manual_seed(7 + island * case.seeds)
    return (Tokens() if case.of_tokens else Net(odd="tp" not in case.style)).to(case.dtype)


def batch(case: Case, step: int, share: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + share)
    if case.of_tokens:
        x = torch.randint(0, 12 if step < 4 else 6, (samples, 4), generator=generator)
        return x, torch.randint(0, 12, (samples * 4,), generator=generator)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(case.dtype)
    if case.nan == (share, step):
        x[1, 2] = torch.nan
    return x, torch.randint(0, 5, (samples,), generator=generator)


def batches_of(case: Case, share: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a share."""
    return [batch(case, step, share) for step in range(case.uneven[share] if case.uneven else case.steps)]


def batches_of_island(case: Case, island: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an island: in each step those of all its shares that have one, as one."""
    own = [batches_of(case, island * case.shares + share) for share in range(case.shares)]
    steps = range(max(map(len, own)))
    return [_together([batches[step] for batches in own if step < len(batches)]) for step in steps]


def _together(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def train(
    case: Case, session: hocket.Session, optimizer: torch.optim.Optimizer, data: Any, weight: Any = None
) -> None:
    """Train as a script does."""
    model, every = session.model, case.accumulate + 1
    for step, (x, y) in enumerate(session.data(data, weight=weight)):
        steps = step % every == case.accumulate
        if step % every == 0:
            optimizer.zero_grad()
        if "no sync" in case.style:
            model.set_requires_gradient_sync(steps)  # type: ignore[operator]
        loss = F.cross_entropy(model(x), y) / every
        if not steps:
            with session.accumulate():
                loss.backward()
            continue
        loss.backward()
        if case.clip:
            session.clip_grad_norm_(case.clip)
        optimizer.step()


def run(case: Case, model: nn.Module, data: Any, weight: Any = None) -> dict[str, Any]:
    """Train a model that is sharded, or whole; return what the replica came to."""
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    probe = batch(case, 99, 0)[0]
    with hocket.attach(model, optimizer, hocket.compose(*case.strategy), **case.attach) as session:
        data = data(session) if callable(data) else data
        train(case, session, optimizer, data, weight)
        distance = session.consensus_distance()
        own = full(model)
        with session.consensus(), torch.no_grad():
            mean, evaluated = full(model), model(probe)
        with torch.no_grad():
            after = model(probe)  # the first forward behind a consensus: of restored values
        restored = full(model)
        sent, skipped = session.counters.bytes_sent, session.skipped_steps
    return {
        "own": own,
        "mean": mean,
        "restored": restored,
        "outputs": {"evaluated": evaluated, "after": after},
        "distance": distance,
        "skipped": skipped,
        "bytes": sent,
    }


def full(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's whole parameters."""
    if hasattr(model, "reshard"):
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def run_whole(case: Case, island: int) -> dict[str, Any]:
    """Train a whole model on what an island reads; on one virtual rank for each island."""
    case_of_whole = Case(
        **{**vars(case), "attach": {**case.attach}, "style": case.style.replace("no sync", "")}
    )
    case_of_whole.attach.pop("lanes", None)
    return run(
        case_of_whole,
        make(case, island),
        batches_of_island(case, island),
        weight=lambda given: len(given[0]) / (SAMPLES * case.shares),
    )
