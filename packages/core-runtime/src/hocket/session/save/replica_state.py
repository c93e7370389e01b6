"""A replica's state in a checkpoint, to continue a rank from its own or from the mean of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from hocket.checkpoint.files import StateFile
from hocket.checkpoint.means import mean_of_mappings, mean_of_section, mean_of_tensor, why_no_mean
from hocket.checkpoint.tree import flatten
from hocket.errors import CheckpointError, HocketError
from hocket.plain import Stateful, Tree
from hocket.segment.shards import local, part_within
from hocket.session.save.exchange_state import load_exchange, state_of_exchange
from hocket.session.save.model_state import state_names
from hocket.session.save.module_state import (
    extra_states,
    load_extra_states,
    not_persistent,
    place_buffers,
)

if TYPE_CHECKING:
    from hocket.session.exchange.active_phase import ActivePhase
    from hocket.session.exchange.parameters import MixState
    from hocket.session.exchange.written import ValuesLeft
    from hocket.session.save.untrained import UntrainedTensors
    from hocket.session.step.optimizers import Optimizers
    from hocket.session.step.stale_gradients import StaleGradients


class ModulesState(TypedDict):
    """The section `modules` of a checkpoint.

    Attributes:
        extra: the results of modules' own `get_extra_state`, by their names.
        not_persistent: the names of buffers that `model.state_dict()` leaves out.
        samples: the number of samples that statistics have seen, as batches have counted.
        equal_statistics: the names of statistics that are equal on all ranks.
        names: of each name in `model.state_dict()`, without wrappers, the tensor in section `model`.
        statistics: the names of buffers that have a mean.
        shards: of each parameter in parts, the whole shape, and the place of this rank's part's first element.
        written: whether the program has written parameters since the last step (see `ValuesLeft`); earlier
            versions did not say.
    """

    extra: dict[str, object]
    not_persistent: list[str]
    samples: float
    equal_statistics: list[str]
    names: dict[str, str]
    statistics: list[str]
    shards: dict[str, tuple[list[int], list[int]]]
    written: NotRequired[bool]


class ReplicaSections(TypedDict):
    """The sections of a checkpoint that hold a rank's replica.

    Attributes:
        model: the parameters and buffers by name, as `tensors_of` returns them.
        optimizer: as `Optimizers.state_dict`.
        exchanges: the states of the open exchanges, by name.
        parameters: the states of exchanges of parameters beside them, by name.
        late: gradients that earlier phases have left, by parameter.
        dropped: the account of dropped sums; empty where there is none.
        modules: what modules keep beside tensors.
    """

    model: dict[str, dict[str, Tensor]]
    optimizer: Tree
    exchanges: dict[str, Tree]
    parameters: dict[str, MixState]
    late: dict[str, Tensor]
    dropped: dict[str, dict[str, Tensor]]
    modules: ModulesState


@dataclass(frozen=True)
class ReplicaState:
    """The whole state that a rank's replica continues from.

    Attributes:
        model: its parameters and buffers, in their own memory.
        optimizers: the attached ones.
        phase: the open exchanges.
        stale: gradients that earlier phases have left for the next step.
        untrained: the model's frozen parameters and buffers.
        left: the values that the session has left in the parameters.
    """

    model: nn.Module
    optimizers: Optimizers
    phase: ActivePhase
    stale: StaleGradients
    untrained: UntrainedTensors
    left: ValuesLeft

    def state_dict(self) -> ReplicaSections:
        """Return the state by sections; tensors are the session's own, not copies."""
        # First: they may still write residuals and parameters.
        self.phase.drop_unused()
        parameters = self.phase.parameters.state_dict()
        return {
            "model": tensors_of(self.model),
            "optimizer": self.optimizers.state_dict(),
            "exchanges": {opened.exchange.name: state_of_exchange(opened) for opened in self.phase.opened},
            "parameters": parameters,
            "late": self.stale.state_dict(),
            "dropped": {} if self.phase.account is None else self.phase.account.state_dict(),
            "modules": {
                "extra": extra_states(self.model),
                "not_persistent": not_persistent(self.model),
                "samples": self.untrained.weights.total,
                "equal_statistics": sorted(self.untrained.equal_statistics()),
                "names": state_names(self.model),
                "statistics": sorted(self.untrained.statistics()),
                "shards": shards_of(self.model),
                "written": self.left.were_written(),
            },
        }

    def why_not_saved(self) -> str:
        """Return the reason why a checkpoint cannot hold the state of optimizers and modules; empty if it can."""
        try:
            flatten({f"optimizer ({self.optimizers.kind})": self.optimizers.state_dict()})
            flatten({"extra state of modules": extra_states(self.model)})
        except Exception as error:
            return str(error) if isinstance(error, HocketError) else f"{type(error).__name__}: {error}"
        return ""

    @torch.no_grad()
    def load(self, file: StateFile) -> None:
        """Load this rank's own state.

        Args:
            file: this rank's.

        Raises:
            CheckpointError: an object does not take its state.
        """
        place_buffers(self.model, file)
        there = set(file.names("model"))
        for name, target in flatten({"model": tensors_of(self.model)})[1].items():
            if name in there:  # not buffers that are new and not persistent
                target.copy_(file.tensor(name))
        self.load_beside_model(file.read, str(file.path))

    def load_beside_model(self, read: Callable[[str], Any], where: str) -> None:
        """Load this rank's own state without the model's tensors.

        Args:
            read: returns a section of a result of `state_dict`.
            where: its origin, for errors.

        Raises:
            CheckpointError: an object does not take its state.
        """
        load_into(self.optimizers, read("optimizer"), f"{where}: optimizer")
        exchanges = read("exchanges")
        for opened in self.phase.opened:
            name = opened.exchange.name
            if name not in exchanges:
                raise CheckpointError(
                    f"{where}: exchanges/{name} is missing: this rank takes part in it now, but did not when the "
                    "checkpoint was saved. Place the ranks on hosts as before"
                )
            with _refusing(f"{where}: exchanges/{name}: the exchange"):
                load_exchange(opened, exchanges[name])
        self.phase.parameters.load_state_dict(read("parameters"))
        self.stale.load_state_dict(read("late"))
        if self.phase.account is not None:
            self.phase.account.load_state_dict(read("dropped"))
        modules: ModulesState = read("modules")
        load_extra_states(self.model, modules["extra"], where)
        self.untrained.weights.total = modules["samples"]
        self.untrained.note_equal(modules["equal_statistics"])
        self.left.note(written=modules.get("written", False))

    @torch.no_grad()
    def load_mean(self, files: Sequence[StateFile]) -> None:
        """Load the mean of another number of ranks.

        Args:
            files: of all ranks that have saved.

        Raises:
            CheckpointError: an object does not take its state.
        """
        first = files[0]
        push_sums = [push_sums_in(file) for file in files]
        place_buffers(self.model, first)
        self._load_buffers(files)
        for name, target in flatten({"model": {"parameters": tensors_of(self.model)["parameters"]}})[
            1
        ].items():
            kept, _ = push_sums[0].get(name, (None, 1.0))
            if kept is not None:
                target.copy_(mean_of_tensor(files, kept))
            else:
                weights = [of_rank.get(name, (None, 1.0))[1] for of_rank in push_sums]
                target.copy_(mean_of_tensor(files, name, weights))
        if not why_no_mean(files, "optimizer"):
            load_into(self.optimizers, mean_of_section(files, "optimizer"), f"{first.path}: optimizer")
        exchanges = first.read("exchanges")
        for opened in self.phase.opened:
            if opened.exchange.name in exchanges:
                opened.count_on(exchanges[opened.exchange.name]["rounds"])
        for mix in self.phase.parameters.exchanges:
            outer_state = mean_of_mappings(files, f"parameters/{mix.opened.exchange.name}/outer")
            for outer in mix.outer.values():
                outer.begin()
                outer.load_state_dict(outer_state)
        self.stale.load_state_dict(mean_of_section(files, "late"))
        load_extra_states(self.model, first.read("modules")["extra"], str(first.path))
        self.left.note(written=any(file.read("modules").get("written", False) for file in files))

    def _load_buffers(self, files: Sequence[StateFile]) -> None:
        """Load the mean of statistics by samples, and the first rank's values of other buffers."""
        samples = [file.read("modules")["samples"] for file in files]
        statistics = self.untrained.statistics()
        self.untrained.weights.total = sum(samples) / len(samples)
        there = set(files[0].names("model"))
        for name, target in flatten({"model": {"buffers": tensors_of(self.model)["buffers"]}})[1].items():
            alike = all(file.describe(name) == files[0].describe(name) for file in files)
            averaged = alike and name.removeprefix("model/buffers/") in statistics
            if name in there:
                target.copy_(
                    mean_of_tensor(
                        files if averaged else files[:1], name, samples if averaged and sum(samples) else None
                    )
                )
        self.untrained.note_equal()


def tensors_of(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return a model's parameters, or this rank's shards, and its buffers by name, in their own memory."""
    return {
        "parameters": {name: local(p.detach()) for name, p in model.named_parameters()},
        "buffers": {name: local(buffer) for name, buffer in model.named_buffers()},
    }


def shards_of(model: nn.Module) -> dict[str, tuple[list[int], list[int]]]:
    """Return the places of this rank's shards in their parameters, by name, as `part_within` gives them."""
    places = {name: part_within(parameter) for name, parameter in model.named_parameters()}
    return {name: place for name, place in places.items() if place is not None}


def load_into(given: Stateful, state: object, where: str) -> None:
    """Load an object's state; a refusal becomes a CheckpointError that begins with `where`."""
    with _refusing(f"{where}: {type(given).__name__}"):
        given.load_state_dict(state)


@contextmanager
def _refusing(who: str) -> Iterator[None]:
    """Surround the loading of a state by `who`; its error becomes a CheckpointError."""
    try:
        yield
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{who} cannot load the saved state ({type(error).__name__}: {error}): build it as when it was saved, or "
            "begin in another folder"
        ) from error


def push_sums_in(file: StateFile) -> dict[str, tuple[str | None, float]]:
    """Return the name of x, if saved, and w, by the name of each push-sum tensor x / w.

    The mean is sum(x) / sum(w), and sum(w) is the number of ranks.
    """
    return {
        f"model/parameters/{name}": (
            f"parameters/{exchange}/values/{name}" if name in state["values"] else None,
            weight,
        )
        for exchange, state in file.read("parameters").items()
        for name, weight in state["weights"].items()
    }
