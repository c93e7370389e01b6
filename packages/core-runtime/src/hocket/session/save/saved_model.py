"""The model of a checkpoint, read from its ranks' files in one process: the replicas' mean, or one replica."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.checkpoint.files import StateFile
from hocket.checkpoint.manifest import Manifest, rank_file
from hocket.checkpoint.means import mean_of_section, mean_of_tensor, why_no_mean
from hocket.checkpoint.model_files import ModelTensors
from hocket.errors import CheckpointError
from hocket.session.save.checks import require_run
from hocket.session.save.replica_state import ModulesState, push_sums_in
from hocket.session.save.strategy_state import strategy_state

# Of a tensor in section `model`.
_MODEL, _PARAMETER = "model/", "parameters/"
_IN_A_SCRIPT = "in a script, call session.load, and then session.export"


@contextlib.contextmanager
def open_checkpoint(path: Path, replica: int | None = None) -> Iterator[SavedModel]:
    """Open a checkpoint, and check that it is whole.

    Args:
        path: its directory.
        replica: the rank whose replica is wanted; None for the mean.

    Raises:
        CheckpointError: it is damaged, or has no such model.
    """
    manifest = Manifest.read(path)
    if replica is not None and not 0 <= replica < manifest.ranks:
        raise CheckpointError(f"{path} has no rank {replica}: allowed are 0 to {manifest.ranks - 1}")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(StateFile(path / rank_file(0)))
        others = (path / rank_file(rank) for rank in range(1, manifest.ranks))
        files = [first, *(stack.enter_context(StateFile(each, lambda: first)) for each in others)]
        for file in files:
            require_run(manifest, file)
            file.check_content(manifest.checksums[file.path.name])
        try:
            modules: ModulesState = first.read("modules")
            modules["names"]
        except KeyError as error:
            raise CheckpointError(
                f"{path} does not name the model's tensors: a pipeline or an earlier version of Hocket saved it. In "
                "a script, call session.load, then session.export"
            ) from error
        saved = SavedModel(path, manifest, files, modules, replica)
        if replica is not None and len(saved.places) > 1:
            raise CheckpointError(
                f"{path} holds a sharded model, of which only the mean can be exported: leave --replica out"
            )
        yield saved


@dataclass(frozen=True)
class SavedModel:
    """The model in a checkpoint, and what is saved beside it.

    Attributes:
        path: the checkpoint's directory.
        manifest: its description.
        files: of all ranks that have saved.
        modules: section `modules` of rank 0's.
        replica: the rank whose replica it is; None for the mean.
    """

    path: Path
    manifest: Manifest
    files: Sequence[StateFile]
    modules: ModulesState
    replica: int | None

    @property
    def tensors(self) -> ModelTensors:
        """The model's tensors, by the names of its state."""
        names = self.modules["names"]
        forms = {}
        for name, held in names.items():
            described = self.files[0].describe(_MODEL + held)
            if described is None:
                raise CheckpointError(
                    f"{self.path}: {name} consists of several tensors, which cannot be exported from files: "
                    f"{_IN_A_SCRIPT}"
                )
            kind, _, shape = described.partition("[")
            sizes = [int(size) for size in shape.rstrip("]").split(",") if size.strip()]
            place = self.modules["shards"].get(held.removeprefix(_PARAMETER))
            whole = sizes if place is None else place[0]
            forms[name] = torch.empty(whole, dtype=getattr(torch, kind), device="meta")
        return ModelTensors(forms, lambda name: self._value(names[name], forms[name]))

    @cached_property
    def places(self) -> dict[int, list[StateFile]]:
        """The files of the ranks at each place of the islands; one place for whole models."""
        files: dict[int, list[StateFile]] = {}
        for file in self.files:
            files.setdefault(file.read("session")["island"][0], []).append(file)
        return files

    @property
    def has_pending(self) -> bool:
        """Tell whether something was on its way between ranks, which is no part of the model."""
        return any("/pending/" in name for name in self.files[0].names("exchanges"))

    def strategy_state(self) -> dict[str, Tensor]:
        """Return what the strategy keeps beside the model on all ranks, as `strategy_state.py` names it."""
        return strategy_state(self.files, whole=len(self.places) == 1)

    def beside(self) -> dict[str, Any]:
        """Return the optimizers' state, what was saved by name, steps and epochs; means of several ranks' tensors.

        Raises:
            CheckpointError: the model is sharded, or the ranks' optimizers have no mean.
        """
        if len(self.places) > 1:
            raise CheckpointError(
                f"{self.path} holds a sharded model, whose optimizer state cannot be exported from files: "
                f"{_IN_A_SCRIPT}"
            )
        files = self.files if self.replica is None else [self.files[self.replica]]
        reason = why_no_mean(files, "optimizer")
        if reason:
            raise CheckpointError(
                f"{self.path}: the ranks' optimizer states have no mean ({reason}): export those of one rank, with "
                "--replica 0"
            )
        return {
            "optimizer": mean_of_section(files, "optimizer"),
            "more": mean_of_section(files, "more"),
            "step": self.manifest.step,
            "epoch": files[0].read("passes")["ended"],
        }

    def _value(self, held: str, form: Tensor) -> Tensor:
        if self.replica is not None:
            return self.files[self.replica].tensor(_MODEL + held)
        if not held.startswith(_PARAMETER):
            return self._buffer(held)
        name = held.removeprefix(_PARAMETER)
        if name not in self.modules["shards"]:
            return self._parameter(name, self.places[min(self.places)])
        whole = torch.empty_like(form, device="cpu")
        for files in self.places.values():
            _, offset = files[0].read("modules")["shards"][name]
            if len(offset) < whole.dim():
                raise CheckpointError(
                    f"{self.path}: {name} is sharded in several pieces on each rank, which cannot be exported from "
                    f"files: {_IN_A_SCRIPT}"
                )
            part = self._parameter(name, files)
            whole[tuple(slice(o, o + s) for o, s in zip(offset, part.shape, strict=True))] = part
        return whole

    def _parameter(self, name: str, files: Sequence[StateFile]) -> Tensor:
        """Return a parameter's mean over ranks that hold the same part, or their outer parameter."""
        held = _MODEL + _PARAMETER + name
        outer = [(file, found) for file in files for found in self._outer[file.path].get(name, ())]
        if outer:
            return mean_of_tensor([file for file, _ in outer], outer[0][1])
        sums = [self._push_sums[file.path].get(held, (None, 1.0)) for file in files]
        if sums[0][0] is not None:
            return mean_of_tensor(files, sums[0][0])
        return mean_of_tensor(files, held, [weight for _, weight in sums])

    def _buffer(self, held: str) -> Tensor:
        """Return a statistic's mean by samples, and the first rank's value of any other buffer."""
        name = _MODEL + held
        alike = all(file.describe(name) == self.files[0].describe(name) for file in self.files)
        if not alike or held.partition("/")[2] not in self.modules["statistics"]:
            return self.files[0].tensor(name)
        samples = [file.read("modules")["samples"] for file in self.files]
        return mean_of_tensor(self.files, name, samples if math.fsum(samples) else None)

    @cached_property
    def _push_sums(self) -> Mapping[Path, dict[str, tuple[str | None, float]]]:
        return {file.path: push_sums_in(file) for file in self.files}

    @cached_property
    def _outer(self) -> Mapping[Path, dict[str, list[str]]]:
        """The names of outer parameters in each file, by parameter; none if they lack what the program has written."""
        written = any(file.read("modules").get("written", False) for file in self.files)
        return {file.path: {} if written else _outer_in(file) for file in self.files}


def _outer_in(file: StateFile) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for exchange in file.keys("parameters"):
        start, end = f"parameters/{exchange}/outer/", "/outer"
        for name in file.names("parameters"):
            if name.startswith(start) and name.endswith(end):
                found.setdefault(name[len(start) : -len(end)], []).append(name)
    return found
