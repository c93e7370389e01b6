"""Trainings for digests.py: every recipe in every overlap, and compositions for the session's other paths.

Uses Hocket's public names alone, so that it runs on commits whose insides differ.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hocket
from hocket.strategy import Overlap

#: Of one rank: digests of its weights and of the consensus, its losses, the bytes that its session counted.
Told = tuple[str, str, list[float], float]

_INPUTS, _CLASSES = 7, 3


@dataclass(frozen=True)
class Training:
    """One training; JSON-able by its fields, as ranks over MPI read it.

    Attributes:
        strategy, overrides: as `hocket.compose` takes them.
        ranks: how many.
        steps: batches of each rank.
        optimizer: a key of `_OPTIMIZERS`.
        dtype: of the model, `mixed` for layers of two kinds.
        engine: arguments of eapipe's Pipeline; None for whole models.
        accumulate: batches in a step.
        clip: the gradient norm that the session clips to.
        poisoned: a rank and the number of its batch that holds NaN; steps with NaN are skipped then.
        scaled: whether a GradScaler scales the loss.
        uneven: whether ranks have different numbers of batches.
        loader: whether `hocket.loader` shares samples out, for two epochs.
        resumed_on: ranks that continue from a checkpoint, which the others save in the middle.
        paced: whether ranks are held up by different seconds, on the virtual clock.
    """

    strategy: Any
    overrides: tuple[str, ...] = ()
    ranks: int = 4
    steps: int = 8
    optimizer: str = "sgd"
    dtype: str = "float32"
    engine: dict[str, Any] | None = None
    accumulate: int = 1
    clip: float | None = None
    poisoned: tuple[int, int] | None = None
    scaled: bool = False
    uneven: bool = False
    loader: bool = False
    resumed_on: int | None = None
    paced: bool = True


# ---- what is trained -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Odd sizes, one layer of 146 KB, a tied weight, one that some batches use, one that none does, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(_INPUTS, 211)
        self.wide = nn.Linear(211, 173)
        self.beside = nn.Linear(_INPUTS, 173, bias=False)
        self.narrow = nn.Linear(173, 13)
        self.norm = nn.BatchNorm1d(13)
        self.again, self.tied = nn.Linear(13, 13), nn.Linear(13, 13)
        self.tied.weight = self.again.weight
        self.last = nn.Linear(13, _CLASSES)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, x: Tensor, uses_beside: bool) -> Tensor:
        hidden = self.wide(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        if uses_beside:
            hidden = hidden + self.beside(x.to(self.beside.weight.dtype))
        hidden = self.norm(self.narrow(torch.tanh(hidden).to(self.narrow.weight.dtype)))
        logits: Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.again(hidden))))) * self.frozen
        return logits.float()


def _net(dtype: str) -> Net:
    net = Net()
    if dtype == "mixed":
        net.first.bfloat16(), net.wide.bfloat16(), net.beside.bfloat16()
        return net
    return net.to(getattr(torch, dtype))


def _chain() -> nn.Sequential:
    torch.manual_seed(6)
    sizes = [_INPUTS, 11, 13, 17, 9, _CLASSES]
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.BatchNorm1d(m), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers[:-3])


_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def _samples(seed: int, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, _INPUTS, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :_CLASSES].argmax(1)


def _batches(training: Training, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    count = training.steps - (rank % 3 if training.uneven else 0)
    batches = []
    for number in range(count):
        x, y = _samples(1000 * rank + number, 8)
        if training.poisoned == (rank, number):
            x[0] = torch.nan
        batches.append((x, y, torch.tensor(rank % 3 == 1 and number % 2 == 0)))
    return batches


def _pace_s(rank: int, step: int) -> float:
    """Return how long a rank is held up; no two ranks are ever equally far."""
    return 0.01 * (1 + ((3 * rank + 7 * step) % 5) * 0.53 + rank * 0.0137)


# ---- how -------------------------------------------------------------------------------------------------------------


def train(training: Training, folder: str | None = None, resume: bool = False) -> Told:
    """Train on this rank.

    Args:
        training: what and how.
        folder: of checkpoints; None for none.
        resume: whether to continue from there; otherwise the rank saves in the middle and ends.
    """
    torch.set_num_threads(1)
    model = _net(training.dtype) if training.engine is None else _chain()
    optimizer = _OPTIMIZERS[training.optimizer]([p for p in model.parameters() if p.requires_grad])
    how: dict[str, Any] = {}
    if training.engine is not None:
        how["engine"] = importlib.import_module("hocket_eapipe").Pipeline(**training.engine)
    if training.poisoned and not training.scaled:
        how["on_nonfinite"] = "skip"
    strategy = hocket.compose(training.strategy, *training.overrides)
    with hocket.attach(model, optimizer, strategy, **how) as session:
        if resume:
            assert folder is not None
            session.load(folder)
        if training.engine is None:
            losses = _train_whole(training, session, None if resume else folder)
        else:
            losses = _train_pipeline(training, session, None if resume else folder)
        counted = session.counters.bytes_sent
        with session.consensus():
            consensus = _digest(model.state_dict())
    return _digest(dict(model.named_parameters())), consensus, losses, counted


def _train_whole(training: Training, session: Any, folder: str | None) -> list[float]:
    optimizer = session.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=training.scaled)
    losses: list[float] = []
    data: Any = _batches(training, session.rank)
    if training.loader:
        x, y = _samples(77, 72)
        data = hocket.loader(TensorDataset(x, y, torch.arange(72) % 2 == 0), 5, seed=3)
    for _ in range(2 if training.loader else 1):
        for number, batch in enumerate(session.data(data)):
            if training.paced:
                session.delay(_pace_s(session.rank, session.step))
            x, y, uses_beside = batch
            is_last = (number + 1) % training.accumulate == 0

            def backward(x: Tensor = x, y: Tensor = y, uses: bool = bool(uses_beside.any())) -> Tensor:
                loss = F.cross_entropy(session.model(x, uses), y) / training.accumulate
                losses.append(loss.item())
                scaler.scale(loss).backward()
                return loss

            def closure(backward: Any = backward) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = backward()
                return loss

            if training.optimizer == "lbfgs":
                optimizer.step(closure)
                continue
            with nullcontext() if is_last else session.accumulate():
                backward()
            if not is_last:
                continue
            if training.clip is not None:
                scaler.unscale_(optimizer)
                session.clip_grad_norm_(training.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if folder is not None and session.step == training.steps // 2:
                session.save(folder)
                return losses
    return losses


def _train_pipeline(training: Training, session: Any, folder: str | None) -> list[float]:
    losses = []
    for step in range(session.step, training.steps):
        result = session.train_batch(_samples(1000 * session.data_rank + step, 8), F.cross_entropy)
        if result is not None:
            losses.append(float(result.loss))
        if folder is not None and session.step == training.steps // 2:
            session.save(folder)
            break
    return losses


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return what is the same for the same bits under the same names."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(
            name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()[:8]


# ---- recipes ---------------------------------------------------------------------------------------------------------

#: What makes a recipe independent of time: redsync.auto measures this otherwise.
_FIXED = {
    "redsync.auto": (
        "gradients.0.collective.costs={gather_latency_s: 1e-5, gather_s_per_byte: 1e-9, "
        "reduce_latency_s: 1e-5, reduce_s_per_byte: 1e-8}",
    )
}

#: Those that mean something; a recipe with one exchange is tried with all, for the refusals.
_OVERLAPS = {"gradients": ("none", "backward"), "parameters": ("none", "forward", "delayed")}
_EVERY_OVERLAP = ("none", "backward", "forward", "delayed")

#: What "delayed" is written as, by the sources that are in use.
_DELAYED = {"overlap": "delayed"} if "delayed" in list(Overlap) else {"overlap": "none", "delay": 1}


def _recipes() -> dict[str, dict[str, Any]]:
    """Return the content of the recipes' files, beside the sources that are in use, by name."""
    packages = Path(hocket.__file__).parents[3]
    files = packages.glob("*/src/**/recipes/*.yaml")
    contents = [yaml.safe_load(file.read_text()) for file in files]
    return {
        content["name"]: content for content in sorted(contents, key=lambda content: str(content["name"]))
    }


def _recipe(name: str, content: dict[str, Any], **how: Any) -> Training:
    engine = content.get("engine")
    arguments = {key: value for key, value in engine.items() if key != "name"} if engine else None
    if arguments is not None:
        return Training({}, engine=arguments, **{"steps": 10, **how})
    return Training(name, **{**how, "overrides": (*_FIXED.get(name, ()), *how.get("overrides", ()))})


def recipe_cases() -> Iterator[tuple[str, Training]]:
    """Yield every recipe as it is."""
    for name, content in _recipes().items():
        yield name, _recipe(name, content)


def overlap_cases() -> Iterator[tuple[str, Training]]:
    """Yield every recipe in each combination of its exchanges' overlaps, and with 6 and with 2 ranks."""
    for name, content in _recipes().items():
        yield f"{name} 6 ranks, Adam", _recipe(name, content, ranks=6, optimizer="adam")
        yield f"{name} 2 ranks, Nesterov", _recipe(name, content, ranks=2, optimizer="nesterov")
        strategy = content.get("strategy", {})
        keys = [(slot, number) for slot in _OVERLAPS for number in range(len(strategy.get(slot) or ()))]
        if not keys:
            continue
        tried = [_OVERLAPS[slot] if len(keys) > 1 else _EVERY_OVERLAP for slot, _ in keys]
        for modes in itertools.product(*tried):
            places = [(f"{s}.{n}", mode) for (s, n), mode in zip(keys, modes, strict=True)]
            overrides = tuple(
                f"{place}.{key}={value}" for place, mode in places for key, value in _hidden(mode).items()
            )
            title = " ".join(f"{place}.overlap={mode}" for place, mode in places)
            yield f"{name} {title}", _recipe(name, content, overrides=overrides)


def _hidden(mode: str) -> dict[str, Any]:
    """Return what hides an exchange, as a config writes it."""
    return _DELAYED if mode == "delayed" else {"overlap": mode}


# ---- compositions ----------------------------------------------------------------------------------------------------


def _gradients(collective: Any = "allreduce", **fields: Any) -> dict[str, Any]:
    return {"gradients": [{"collective": collective, "segments": "layers", **fields}]}


def _parameters(topology: Any = "ring", push_sum: bool = False, **fields: Any) -> dict[str, Any]:
    gossip = {"name": "gossip", "push_sum": push_sum}
    return {"parameters": [{"collective": gossip, "topology": topology, "segments": "layers", **fields}]}


def _around(*names: str, **inner: Any) -> dict[str, Any]:
    """Return a compressor within wrappers, the outermost first."""
    compressor: dict[str, Any] = inner
    for name in reversed(names):
        more = {"max_norm": 0.05} if name == "local_clipping" else {}
        compressor = {"name": name, **more, "compressor": compressor}
    return compressor


_TOPK = {"name": "topk", "density": 0.1}
_DRAWN = {"name": "shared_random", "density": 0.2}
_FEEDBACK = _around("error_feedback", **_TOPK)
_CORRECTED = _around("momentum_correction", "error_feedback", **_TOPK)
_SPARSE = _gradients("sparse_allreduce", compressor=_FEEDBACK)
_SPARSE_BEHIND = _gradients("sparse_allreduce", compressor=_FEEDBACK, overlap="backward")
_MOMENTUM = _gradients("sparse_allreduce", compressor=_CORRECTED, overlap="backward")
_IRREGULAR = {"name": "irregular_directed", "density": 0.4}


def _hierarchy(size: Any, sharded: bool = False, slot: str = "gradients", **fields: Any) -> dict[str, Any]:
    group = {"name": "group", **size, "sharded": sharded}
    over = [group, {**group, "name": "leaders"}]
    first = {"collective": "allreduce", "over": group, "segments": "layers", **fields}
    last = {"collective": "broadcast", "over": group, "segments": "layers"}
    if slot == "gradients":
        return {"gradients": [first, {**first, "over": over[1], "overlap": "none"}, last]}
    gossip = {"collective": "gossip", "topology": "exponential", "over": over[1], "segments": "layers"}
    return {"gradients": [first], "parameters": [gossip, {**last, "overlap": "forward"}]}


def _eager(**fields: Any) -> dict[str, Any]:
    return _gradients({"name": "eager.partial_allreduce", **fields})


def _phases(first: dict[str, Any], **later: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"gradients": [], "parameters": []}
    phases = {int(step.removeprefix("at_")): {**empty, **strategy} for step, strategy in later.items()}
    return {**empty, **first, "phases": phases}


def other_cases() -> dict[str, Training]:
    """Return compositions by name, on the virtual transport."""
    cases = {
        **_session_cases(),
        **_compressor_cases(),
        **_gossip_cases(),
        **_scope_cases(),
        **_resumed_cases(),
        **_plugin_cases(),
        **_pipeline_cases(),
    }
    return {f"({name})": case for name, case in cases.items()}


def _session_cases() -> dict[str, Training]:
    poisoned = (2, 3)
    return {
        "accumulation": Training("sgd", steps=9, accumulate=3),
        "accumulation behind backward": Training("agd", steps=9, accumulate=3, optimizer="adam"),
        "accumulation, residual": Training(_SPARSE, steps=9, accumulate=3),
        "accumulation, gossip": Training("dpsgd", steps=9, accumulate=3),
        "clipped": Training("agd", clip=0.05),
        "NaN skipped": Training("sgd", poisoned=poisoned),
        "NaN skipped behind backward": Training("agd", poisoned=poisoned, optimizer="adam"),
        "NaN skipped, residual": Training(_SPARSE_BEHIND, poisoned=poisoned),
        "NaN skipped, momentum": Training(_MOMENTUM, poisoned=poisoned),
        "NaN skipped, gossip": Training("crossover", poisoned=poisoned),
        "GradScaler": Training("agd", scaled=True, poisoned=poisoned),
        "GradScaler, clipped": Training("sgd", scaled=True, clip=0.05),
        "GradScaler, residual": Training(_SPARSE_BEHIND, scaled=True, poisoned=poisoned),
        "uneven": Training("sgd", uneven=True),
        "uneven behind backward": Training("agd", uneven=True),
        "uneven, momentum": Training(_MOMENTUM, uneven=True),
        "uneven, gossip": Training("sgp", uneven=True),
        "loader": Training("agd", loader=True),
        "loader, gossip": Training("overlap_sgp", loader=True),
        "samples travel": Training("gossipgrad", loader=True),
        "samples travel, 5 ranks": Training({"samples": "gossipgrad.ring_shuffle", **_gradients()}, ranks=5),
        "LBFGS": Training("sgd", optimizer="lbfgs", dtype="float64"),
        "LBFGS behind backward, uneven": Training("agd", optimizer="lbfgs", uneven=True),
        "LBFGS, NaN skipped": Training("sgd", optimizer="lbfgs", poisoned=poisoned),
        "phases": Training(
            _phases(_MOMENTUM, at_3=_parameters(**_DELAYED), at_5=_SPARSE, at_7=_gradients()), steps=10
        ),
        "phases, push-sum": Training(
            _phases(_parameters(_IRREGULAR, True, overlap="forward"), at_4=_gradients(), at_6=_parameters()),
            optimizer="adam",
        ),
        "several exchanges": Training(
            {
                "gradients": [
                    {"collective": "reduce", "segments": "layers", "overlap": "backward"},
                    {"collective": "broadcast", "segments": "layers"},
                ],
                "parameters": [
                    *_parameters("exponential")["parameters"],
                    {"collective": "allreduce", "segments": "model", "every": 3},
                ],
            }
        ),
        "every 2": Training(_parameters(every=2), optimizer="nesterov"),
        "every 2, forward": Training(_parameters(every=2, overlap="forward")),
        "every 2, delayed": Training(_parameters(every=2, **_DELAYED)),
        "every log2": Training(_parameters(every="log2_ranks"), ranks=6),
        "bytes": Training(_gradients(segments={"name": "bytes", "size_mb": 0.02}, overlap="backward")),
        "thread": Training(_parameters(progress="thread", overlap="forward")),
        "thread, delayed": Training(_parameters("exponential", True, progress="thread", **_DELAYED)),
        "thread, gradients": Training(
            _gradients("gossip", topology="random_matching", progress="thread", overlap="backward")
        ),
        **{f"model in {dtype}": Training("agd", dtype=dtype) for dtype in ("bfloat16", "float16", "mixed")},
        "gossip in bfloat16": Training("dpsgd", dtype="bfloat16"),
        "push-sum in bfloat16": Training(_parameters(_IRREGULAR, True), dtype="bfloat16"),
        "mixed, forward": Training("crossover", dtype="mixed"),
    }


def _compressor_cases() -> dict[str, Training]:
    clipped = _around("local_clipping", "momentum_correction", "error_feedback", **_TOPK)
    unmasked = {**_CORRECTED, "masking": False}
    return {
        "top-k": Training(_gradients("sparse_allreduce", compressor=_TOPK)),
        "residual": Training(_SPARSE, optimizer="adam"),
        "residual behind backward": Training(_SPARSE_BEHIND, ranks=6),
        "residual of drawn": Training(_gradients(compressor=_around("error_feedback", **_DRAWN))),
        "momentum": Training(_gradients("sparse_allreduce", compressor=_CORRECTED)),
        "momentum, unmasked": Training(
            _gradients("sparse_allreduce", compressor=unmasked), optimizer="nesterov", ranks=3
        ),
        "local clipping": Training(_gradients("sparse_allreduce", compressor=clipped)),
        **{
            f"{cast} gradients": Training(_gradients("sparse_allreduce", compressor=cast, overlap="backward"))
            for cast in ("bf16", "fp16")
        },
        "fp16 residual": Training(
            _gradients("sparse_allreduce", compressor=_around("error_feedback", name="fp16"))
        ),
        "gossip of residual": Training(_gradients("gossip", topology="ring", compressor=_FEEDBACK)),
        "gossip of drawn": Training(_parameters(compressor=_DRAWN)),
        "gossip of bf16": Training(_parameters(compressor="bf16", overlap="forward")),
        "gossip of drawn, delayed": Training(_parameters("random_matching", compressor=_DRAWN, **_DELAYED)),
        **{
            f"allreduce, {algorithm}, {ranks}": Training(
                _gradients({"name": "allreduce", "algorithm": algorithm}, overlap="backward"), ranks=ranks
            )
            for algorithm in ("recursive_doubling", "ring")
            for ranks in (4, 6)
        },
    }


def _gossip_cases() -> dict[str, Training]:
    topologies = (
        "complete",
        {"name": "exponential", "peers": "all"},
        {"name": "random_matching", "seed": 4},
        "crossover.fair_random",
        "crossover.unfair",
        "gossipgrad.dissemination",
    )
    cases = {
        f"push-sum, {overlap}, {ranks}": Training(
            _parameters(_IRREGULAR, True, **_hidden(overlap)), ranks=ranks, optimizer=optimizer
        )
        for overlap in _OVERLAPS["parameters"]
        for ranks, optimizer in ((4, "sgd"), (6, "adam"))
    }
    for topology in topologies:
        name = topology["name"] if isinstance(topology, dict) else topology
        cases[f"{name}, 5 ranks"] = Training(_parameters(topology, overlap="forward"), ranks=5)
    return cases | {
        "gossip of gradients": Training(_gradients("gossip", topology="exponential", overlap="backward"))
    }


def _scope_cases() -> dict[str, Training]:
    two, three, four = {"size": 2}, {"size": 3}, {"size": 4}
    return {
        "groups of 2": Training(_hierarchy(two, overlap="backward")),
        "groups of 4 and 2": Training(_hierarchy(four, overlap="backward"), ranks=6),
        "2 groups of 5": Training(_hierarchy({"count": 2}), ranks=5),
        "sharded groups": Training(_hierarchy(two, sharded=True, overlap="backward")),
        "sharded groups of 3": Training(_hierarchy(three, sharded=True), ranks=6, optimizer="adam"),
        "gossip of leaders": Training(_hierarchy(two, slot="parameters")),
        "gossip of sharded leaders": Training(
            _hierarchy(three, sharded=True, slot="parameters", overlap="backward"), ranks=6
        ),
        "sparse groups": Training(
            {
                "gradients": [
                    {**_SPARSE["gradients"][0], "over": {"name": "group", **two}, "overlap": "backward"},
                    {"collective": "allreduce", "over": {"name": "leaders", **two}, "segments": "layers"},
                    {"collective": "broadcast", "over": {"name": "group", **two}, "segments": "layers"},
                ]
            }
        ),
    }


def _resumed_cases() -> dict[str, Training]:
    strategies = {
        "agd": "agd",
        "momentum": _MOMENTUM,
        "forward": "crossover",
        "delayed": "overlap_sgp",
        "push-sum": _parameters(_IRREGULAR, True, **_DELAYED),
        "sharded": _hierarchy({"size": 2}, sharded=True, slot="parameters"),
        "samples": "gossipgrad",
        "redsync": "redsync",
        "phases": _phases(_parameters(overlap="forward"), at_4=_SPARSE, at_6=_gradients()),
    }
    same = {f"{name} resumed": Training(s, resumed_on=4) for name, s in strategies.items()}
    other = {
        f"{name} resumed on 3": Training(strategies[name], resumed_on=3, optimizer=optimizer)
        for name, optimizer in (("agd", "adam"), ("momentum", "sgd"), ("delayed", "sgd"), ("push-sum", "sgd"))
    }
    return same | other | {"loader resumed": Training("agd", loader=True, steps=10, resumed_on=4)}


def _plugin_cases() -> dict[str, Training]:
    eager = {
        "solo, sum": _eager(candidates=None, missed="sum"),
        "two, last, staleness 1": _eager(candidates=2, starts="last", staleness=1),
        "all, last": _eager(candidates=None, starts="last"),
        "by messages": _eager(candidates=None, shared=False),
        "ring": _eager(candidates=1, algorithm="ring", shared=False),
        "star": _eager(candidates=1, algorithm="star", shared=False),
        "then allreduce": _phases(_eager(candidates=None, missed="sum"), at_5=_gradients()),
    }
    redsync = {
        "exact": {},
        "trimmed": {},
        "threshold": {},
        "sampled": {},
        "hybrid": {"sampled_from_kb": 64.0},
        "asq": {},
    }
    cases = {f"eager {name}": Training(strategy, ranks=4) for name, strategy in eager.items()}
    cases["eager solo behind backward, 6"] = Training(
        {"gradients": [{**eager["solo, sum"]["gradients"][0], "overlap": "backward"}]},
        ranks=6,
        optimizer="adam",
    )
    cases["eager solo, uneven"] = Training("eager.solo", uneven=True)
    cases["eager resumed"] = Training(eager["all, last"], resumed_on=4)
    for name, fields in redsync.items():
        compressor = {"name": f"redsync.{name}", "density": 0.01, "dense_below_kb": 1.0, **fields}
        collective = {"name": "redsync.allreduce", "auto": False}
        strategy = _gradients(collective, compressor=compressor, overlap="backward")
        cases[f"redsync {name}"] = Training(strategy, ranks=6 if name == "hybrid" else 4)
    cases["redsync, NaN skipped"] = Training("redsync", poisoned=(1, 2))
    cases["redsync, accumulation"] = Training("redsync.asq", steps=9, accumulate=3)
    return cases


def _pipeline_cases() -> dict[str, Training]:
    mesh = {"pipelines": 2, "stages": 2}
    return {
        "pipelines, agd": Training("agd", engine={**mesh, "policy": "stashing"}),
        "pipelines, gossip": Training("dpsgd", engine={**mesh, "policy": "elastic", "tau": 2}),
        "pipelines, residual": Training(_SPARSE, engine={**mesh, "policy": "flush", "micro_batches": 4}),
        "virtual stages": Training({}, ranks=2, engine={"stages": 4, "policy": "elastic"}, optimizer="adam"),
        "reestimated": Training({}, ranks=2, engine={"stages": 3, "buffers": "reestimated"}),
        "pipeline resumed": Training(
            {}, ranks=2, engine={"stages": 3, "policy": "vertical_sync"}, resumed_on=2
        ),
    }


def mpi_cases() -> dict[str, Training]:
    """Return what is trained over MPI, too: nothing that depends on time; on virtual ranks its digests may differ."""
    others = other_cases()
    cases = {
        **{
            name: Training(name)
            for name in ("sgd", "agd", "overlap_sgp", "crossover.hierarchical", "gossipgrad")
        },
        "redsync": Training("redsync"),
        "eapipe": Training({}, engine={"policy": "elastic"}, steps=10),
        "irregular": others["(push-sum, delayed, 4)"],
        "residual": Training(_SPARSE_BEHIND),
        **{
            name: others[f"({name})"]
            for name in ("NaN skipped, momentum", "uneven", "sharded groups", "thread")
        },
        "mixed": Training("dpsgd", dtype="mixed"),
        "phases": others["(phases)"],
        "LBFGS": others["(LBFGS)"],
    }
    two = {
        f"{name}, 2 ranks": replace(cases[name], ranks=2) for name in ("sgd", "agd", "irregular", "residual")
    }
    return {f"[MPI] {name}": replace(case, paced=False) for name, case in (cases | two).items()}


def across_cases() -> dict[str, Training]:
    """Return what is trained over two transports of processes: every recipe with 2 and 4 ranks, and `mpi_cases`.

    Those of eager strategies are left out: which gradients are in time depends on the clock, on any transport.
    """
    recipes = {
        f"{name}, {ranks} ranks": replace(_recipe(name, content, ranks=ranks), paced=False)
        for name, content in _recipes().items()
        if "partial_allreduce" not in str(content)
        for ranks in (2, 4)
    }
    return recipes | mpi_cases()
