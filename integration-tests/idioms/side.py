"""Both sides of a program: a rank's session, with its share of each batch, or no session, with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hocket
from hocket.strategy import Strategy

#: What a program tells at its end: what of its numbers is to be compared, by name.
Told = dict[str, Tensor]


class Interrupted(Exception):  # noqa: N818
    """The job has been ended in mid-training, after it has saved."""


@dataclass
class Ended:
    """The result of a program on a rank.

    Attributes:
        told: the models' parameters and buffers, and what the program returned; empty where it was interrupted.
        agreed: the models' parameters after a consensus.
        steps: of each session its steps, and those of its first optimizer.
        moved: the names of what was to stay as it was, and has changed.
    """

    told: Told
    agreed: Told
    steps: list[tuple[int, int]]
    moved: list[str]


class Alone:
    """A session's place where there is none: one process, in which everything is as in plain torch."""

    rank, size, is_main = 0, 1, True
    step = 0

    def data(self, loader: Iterable[Any], weight: object = None) -> Iterable[Any]:
        return loader

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    consensus = replica = accumulate

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def consensus_distance(self) -> float:
        return 0.0

    def settle(self) -> None:
        pass

    close = settle


@dataclass
class _Attached:
    """A model with its session, and how many steps its first optimizer has made."""

    session: Any
    model: nn.Module
    more: dict[str, Any]
    steps: int = 0

    def count(self, *_: object) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


@dataclass
class Side:
    """The setting of a program's run.

    Attributes:
        strategy: of its sessions; None for one process without Hocket.
        folder: where it saves, or what it begins from.
        stops: the step before which it saves, and is interrupted.
        place: the next step.
    """

    strategy: Strategy | None = None
    folder: Path | None = None
    stops: int | None = None
    place: int = 0
    _attached: list[_Attached] = field(default_factory=list)
    _still: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        peer = None if self.strategy is None else hocket.join()
        self.rank, self.size = (0, 1) if peer is None else (peer.rank, peer.size)

    def attach(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **more: Any) -> Any:
        """Return a session, resumed where the job was interrupted.

        Args:
            more: what else is to be saved, by name.
        """
        session = Alone() if self.strategy is None else hocket.attach(model, optimizer, self.strategy)
        attached = _Attached(session, model, {**more, "side": self})
        attached.more["steps"] = attached
        first = optimizer if isinstance(optimizer, Optimizer) else optimizer[0]
        first.register_step_post_hook(attached.count)
        if isinstance(session, hocket.Session) and self.folder is not None and self.stops is None:
            session.load(self._folder_of(len(self._attached)), **attached.more)
        self._attached.append(attached)
        return session

    def _folder_of(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / str(number)

    def share(self, batch: Tensor) -> Tensor:
        """Return this rank's samples of a whole batch."""
        return batch[self.rank :: self.size]

    def loader(self, batches: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """Return this rank's shares of whole batches."""
        return [tuple(self.share(each) for each in batch) for batch in batches]

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left, up to where the job is interrupted."""
        for step in range(self.place, count):
            self.reach(step)
            yield step

    def reach(self, step: int) -> None:
        """Save and leave, where the job is to be interrupted before this step."""
        self.place = step
        if step != self.stops:
            return
        for number, each in enumerate(self._attached):
            each.session.save(self._folder_of(number), **each.more)
        raise Interrupted

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]

    def still(self, name: str, module: nn.Module) -> None:
        """Note that a module's parameters stay as they are from here on."""
        for key, parameter in module.named_parameters():
            self._still[f"{name}.{key}"] = parameter, parameter.detach().clone()

    def run(self, train: Program) -> Ended:
        """Run a program, and look at what it leaves."""
        try:
            told = train(self)
        except Interrupted:
            return Ended({}, {}, [], [])
        self._settle()
        moved = [name for name, (now, before) in self._still.items() if not torch.equal(now, before)]
        told = {**copy.deepcopy(told), **self._models(buffers=True)}
        steps = [(each.session.step, each.steps) for each in self._attached]
        for each in self._attached:
            each.session.consensus()
        agreed = self._models(buffers=False)
        for each in self._attached:
            each.session.close()
        return Ended(told, agreed, steps, moved)

    def _settle(self) -> None:
        for each in self._attached:
            each.session.settle()

    def _models(self, *, buffers: bool) -> Told:
        named: Told = {}
        for number, each in enumerate(self._attached):
            state = {**dict(each.model.named_buffers())} if buffers else {}
            state |= dict(each.model.named_parameters())
            named |= {f"{number}.{name}": tensor.detach().clone() for name, tensor in state.items()}
        return named


Program = Callable[[Side], Told]


def flat(model: nn.Module) -> Tensor:
    """Copy the parameters into one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
