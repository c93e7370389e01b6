"""Training by averagings of pairs, whose order each rank writes down, and the replay of that order in plain NumPy.

What ranks do are functions of this module, so that a rank in another process can import them by name.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hocket
from hocket.testing.session import inner_of
from hocket.transport.faults import Faults
from hocket.transport.peer import Peer
from hocket.transport.virtual import VirtualWorld
from hocket_adpsgd import pairing

Array = NDArray[np.float64]
Event = list[Any]
Told = list[dict[str, Any]]

#: Elements of the model's parameters, which are one segment each with `segments: layers`.
NUMELS = (7, 3)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        steps: of every rank.
        paces_s: how long a step of each rank takes, in turn.
        lr: of SGD; with 0 nothing changes but by averagings.
        exchange: fields besides the recipe's.
        consensus: after these steps the replicas' mean is looked at.
        settles: after these steps rank 0, alone, merges what is under way.
        phase: from this step on gradients are summed by an allreduce in its place; None for never.
        save, load: a folder of checkpoints, to save into after the last step, or to go on from.
    """

    steps: int = 12
    paces_s: Sequence[float] = (0.001,)
    lr: float = 0.1
    exchange: Mapping[str, Any] | None = None
    consensus: Sequence[int] = ()
    settles: Sequence[int] = ()
    phase: int | None = None
    save: str | None = None
    load: str | None = None

    @property
    def strategy(self) -> hocket.Strategy:
        config: dict[str, Any] = {"recipe": "adpsgd"}
        given = [f"parameters.0.{key}={value}" for key, value in (self.exchange or {}).items()]
        if self.phase is not None:
            config["phases"] = {
                str(self.phase): {"gradients": [{"collective": "allreduce"}], "parameters": []}
            }
        return hocket.compose(config, *given)


class Noted(pairing.SharedCopy):
    """Writes down in which order its methods took effect."""

    def __init__(self, numel: int, dtype: np.dtype[Any]) -> None:
        super().__init__(numel, dtype)
        self.events: list[Event] = []
        self._together = threading.Lock()

    def enter(self, values: Any, partner: int | None) -> int:
        with self._together:
            self.events.append(["enter", partner])
            return super().enter(values, partner)

    def begin(self, partner: int) -> int:
        with self._together:
            self.events.append(["begin", partner])
            return super().begin(partner)

    def end(self, partner: int) -> None:
        with self._together:
            self.events.append(["end", partner])
            super().end(partner)

    def fetch(self, out: Any) -> tuple[int, ...]:
        with self._together:
            partners = super().fetch(out)
            self.events.append(["fetch", list(partners)])
            return partners

    def take_partners(self) -> tuple[int, ...]:
        with self._together:
            partners = super().take_partners()
            self.events.append(["given", list(partners)])
            return partners

    def reset(self, changes: Any = 0.0) -> None:
        with self._together:
            self.events.append(["take"])
            super().reset(changes)


class _Layer(nn.Module):
    def __init__(self, values: Array) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.from_numpy(values.copy()))

    def forward(self, target: Tensor) -> Tensor:
        return (self.values - target).square().sum() / 2


class _Quadratic(nn.Module):
    """A layer for each of `NUMELS`; the loss is half of the squared distance from a target."""

    def __init__(self, values: Array) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Layer, np.split(values, np.cumsum(NUMELS)[:-1])))

    def forward(self, target: Tensor) -> Tensor:
        parts = zip(self.layers, target.split(NUMELS), strict=True)
        return torch.stack([layer(part) for layer, part in parts]).sum()


def start_of(rank: int) -> Array:
    """Return what a rank's parameters begin with, each rank with its own."""
    return np.random.default_rng([1, rank]).standard_normal(sum(NUMELS))


def target_of(rank: int, step: int) -> Array:
    """Return where a rank's gradient leads in a step."""
    return np.random.default_rng([2, rank, step]).standard_normal(sum(NUMELS))


@contextmanager
def noted() -> Iterator[None]:
    """Have what this process opens write down its order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "SharedCopy", Noted)
        yield


def train_on(peer: Peer, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Train on a rank of a job that tests have started."""
    torch.set_num_threads(1)
    with noted():
        return train(Case(**plain), peer)


def train(case: Case, peer: Peer | None = None) -> dict[str, Any]:
    """Train on this rank, within `noted`; return JSON values."""
    peer = peer or hocket.join()
    rank = peer.rank
    model = _Quadratic(start_of(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    told: dict[str, Any] = {"means": []}
    with hocket.attach(model, optimizer, case.strategy, initial="keep", peer=peer) as session:
        if case.load is not None:
            session.load(case.load)
        copies = [
            copy
            for opened in inner_of(session).phase.opened
            for copy in getattr(opened.channel, "_copies", {}).values()
        ]
        first = session.step
        for target in session.data([torch.from_numpy(target_of(rank, first + i)) for i in range(case.steps)]):
            session.peer.clock.sleep(case.paces_s[rank % len(case.paces_s)])
            optimizer.zero_grad()
            model(target).backward()
            optimizer.step()
            if session.step in case.settles and rank == 0:
                session.settle()
                for copy in copies:
                    copy.events.append(["settled"])
            if session.step in case.consensus:
                with session.consensus():
                    told["means"].append(_flat(model).tolist())
        if case.save is not None:
            session.save(case.save)
    counters = session.counters
    told |= {
        "outcomes": counters.outcomes,
        "active": counters.active,
        "staleness": counters.staleness_max,
        "partners": {str(other): count for other, count in counters.partners.items()},
        "bytes": counters.bytes_sent,
    }
    return {**told, "parameters": _flat(model).tolist(), "events": [copy.events for copy in copies]}


def _flat(model: nn.Module) -> Array:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


class _Replayed:
    """One rank of a replay: its parameters x, its shared copy y, and the changes p since they were fetched."""

    def __init__(self, rank: int, place: slice, lr: float) -> None:
        self.rank, self.place, self.lr = rank, place, lr
        self.x = start_of(rank)[place]
        self.y, self.p, self.entered = (np.zeros_like(self.x) for _ in range(3))
        self.come: Array | None = None
        self.steps = 0

    def enter(self) -> None:
        self.x = self.x - self.lr * (self.x - target_of(self.rank, self.steps)[self.place])
        self.steps += 1
        self.merge()
        self.entered = self.x
        self.y = self.x + self.p

    def fetch(self) -> None:
        self.come = self.y - self.entered
        self.p = np.zeros_like(self.p)

    def merge(self) -> None:
        if self.come is not None:
            self.x = self.x + self.come
        self.come = None

    def take(self) -> None:
        self.merge()
        self.x = self.x + self.p
        self.p = np.zeros_like(self.p)

    def move(self, change: Array) -> None:
        self.y, self.p = self.y + change, self.p + change


def replay(logs: Sequence[Sequence[Event]], place: slice, lr: float) -> Array:
    """Carry out what ranks wrote down, one event after the other, each as soon as those it needs are done.

    Args:
        logs: by rank, of one segment.
        place: the segment's elements.
        lr: the learning rate.

    Returns:
        The parameters at the end, [ranks, n].
    """
    ranks = [_Replayed(rank, place, lr) for rank in range(len(logs))]
    begun: dict[tuple[int, int], list[Array]] = defaultdict(list)
    ended: dict[tuple[int, int], int] = defaultdict(int)
    left = [list(reversed(log)) for log in logs]
    while any(left):
        before = sum(map(len, left))
        for rank, log in zip(ranks, left, strict=True):
            while log:
                kind, *of_event = log[-1]
                me = rank.rank
                if kind == "begin":
                    begun[me, of_event[0]].append(rank.y)
                elif kind == "end":
                    other = of_event[0]
                    number = ended[me, other]
                    if len(begun[other, me]) <= number:
                        break  # the other has not come to it yet
                    rank.move((begun[other, me][number] - begun[me, other][number]) / 2)
                    ended[me, other] += 1
                elif kind == "enter":
                    rank.enter()
                elif kind == "fetch":
                    rank.fetch()
                elif kind == "settled":
                    rank.merge()
                elif kind == "take":
                    rank.take()
                log.pop()
        assert sum(map(len, left)) < before, "the ranks' events contradict each other"
    for (one, other), count in ended.items():
        assert count == ended[other, one] == len(begun[one, other])
    return np.stack([rank.x for rank in ranks])


def simulate(case: Case, ranks: int, faults: Faults | None = None, seed: int = 0) -> Told:
    with noted():
        return VirtualWorld(ranks, seed=seed, wrap=None if faults is None else faults.wrap).run(
            lambda: train(case)
        )


def check(case: Case, told: Told) -> None:
    """Compare what ranks end with, with the replay of what they wrote down."""
    layers = (case.exchange or {}).get("segments") == "layers"
    ends = [0, *(accumulate(NUMELS) if layers else [sum(NUMELS)])]
    got = np.array([of_rank["parameters"] for of_rank in told])
    for segment, (start, stop) in enumerate(pairwise(ends)):
        logs = [of_rank["events"][segment] for of_rank in told]
        expected = replay(logs, slice(start, stop), case.lr)
        np.testing.assert_allclose(got[:, start:stop], expected, rtol=0, atol=1e-14 * max(1, case.steps / 4))
        for of_rank, log in zip(told, logs, strict=True):
            assert sum(event[0] == "enter" for event in log) == case.steps
            assert of_rank["staleness"] >= max(len(e[1]) for e in log if e[0] == "fetch")
    for of_rank in told:
        fetched = [e[1] for log in of_rank["events"] for e in log if e[0] == "fetch"]
        assert of_rank["outcomes"] == len(fetched) == case.steps * (len(ends) - 1)
        given = [e[1] for log in of_rank["events"] for e in log if e[0] in ("fetch", "given")]
        assert of_rank["partners"] == {str(r): n for r, n in Counter(chain(*given)).items()}
        assert of_rank["active"] == sum(1 + len(set(partners)) for partners in fetched)


def mean_of(told: Told) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean([of_rank["parameters"] for of_rank in told], axis=0)
    return mean


def mean_at_start(ranks: int) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean([start_of(rank) for rank in range(ranks)], axis=0)
    return mean
