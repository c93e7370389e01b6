"""Checkpoints of a session: a replica's contents, the order in which ranks write and read, and refusals."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket import randomness
from hocket.checkpoint import folder as folders
from hocket.checkpoint.collectively import collectively, of_ranks, on_rank_0
from hocket.checkpoint.files import (
    LEFT,
    StateFile,
    Written,
    describe,
    mean_of_section,
    why_no_mean,
    write_state,
)
from hocket.checkpoint.manifest import MANIFEST, Manifest, rank_file
from hocket.checkpoint.shared import patiently, require_folder
from hocket.checkpoint.subclasses import is_composite
from hocket.checkpoint.tree import flatten
from hocket.errors import CheckpointError, DamagedError, HocketError, MissingFileError, some
from hocket.plain import Stateful, flattened
from hocket.plugin import CORE, default_registry
from hocket.session.exchange.checksums import compare
from hocket.session.save.module_state import (
    comparable,
    not_persistent,
)
from hocket.session.save.replica_state import load_into

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession

__all__ = ["Checkpoints", "Resumed"]

_log = logging.getLogger("hocket")

#: What `session.load` may do where there is no complete checkpoint.
_MISSING = ("error", "start")
_BEGIN_THERE = "session.load(..., missing='start') begins at step 0 then; or name another folder"


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a session continues from.

    Attributes:
        path: the checkpoint's directory; None where there was none, and the session begins.
        step: number of steps that had ended.
        epoch: number of passes over `session.data` that had ended: the pass to continue, or to begin, counted from 0.
        exact: whether each rank's whole state was restored; else ranks continue from the replicas' mean, and the pass
            that was under way begins again.
    """

    path: Path | None
    step: int
    epoch: int
    exact: bool


class Checkpoints:
    """The checkpoints of a session in a folder, to save and to load; collective.

    Args:
        session: the session to save, or to load into.
        folder: of checkpoints, on a disk that all ranks share.
        more: other objects with `state_dict` and `load_state_dict`, by name.
    """

    def __init__(self, session: EngineSession, folder: Path, more: Mapping[str, Stateful]) -> None:
        self._session, self._folder, self._more = session, folder, more
        self._peer = session.peer

    def save(self, keep: int | None) -> Path:
        """Carry out `session.save`."""
        session, peer, folder = self._session, self._peer, self._folder
        session.end_step_to_save()
        step = session.step
        steps = session.gathered(step, "session.save")
        if any(of_rank != step for of_rank in steps):
            each = ", ".join(f"{of_rank} on rank {rank}" for rank, of_rank in enumerate(steps))
            raise CheckpointError(
                f"the ranks save different steps: {each}. All ranks save after the same step"
            )

        session.compare_replicas("session.save")
        with contextlib.ExitStack() as stack:  # locks that rank 0 holds meanwhile

            def begin() -> tuple[str, str]:
                path = stack.enter_context(
                    folders.begin(folder, step, session.run_id, session.saved, session.passed_over)
                )
                session.passed_over = ()
                return path.name, session.run_id

            name, run = on_rank_0(peer, begin)
            path = folder / name
            collectively(peer, lambda: require_folder(path))
            left = self._left_to_rank_0()
            written = collectively(
                peer, lambda: write_state(path / rank_file(peer.rank), self._state_dict(left), run)
            )

            def end() -> str:
                manifest = self._manifest([Written(*each) for each in written])
                patiently(lambda: manifest.write(path))
                session.saved = folders.finish(path)
                if keep is not None:
                    folders.keep_newest(folder, keep, run)
                stack.close()  # before any rank goes on
                return session.saved.name

            return folder / on_rank_0(peer, end)

    def load(self, missing: str) -> Resumed:
        """Carry out `session.load`."""
        session, peer = self._session, self._peer
        found = on_rank_0(peer, lambda: self._find(missing))
        if found is None:
            return Resumed(None, session.step, session.epochs.ended, exact=True)
        passed: list[tuple[Path, str]] = []
        for path in map(Path, found):
            with contextlib.ExitStack() as stack:
                files: list[StateFile] = []
                damage = self._open(path, files, stack)
                if damage:
                    passed.append((path, damage))
                    continue
                exact = self._go_on_from(path, files)
                session.passed_over = [damaged for damaged, _ in passed]
                if peer.rank == 0:
                    for damaged, why in passed:
                        _log.warning("%s is passed over: %s", damaged, why)
                    self._warn_of_changes(path, Manifest.read(path), files)
            return Resumed(path, session.step, session.epochs.ended, exact)
        others = f", {some([path.name for path, _ in passed[1:]])}" if passed[1:] else ""
        raise DamagedError(
            f"{passed[0][1]}; no other is whole{others}: put the files back, or begin anew in another folder"
        )

    def _open(self, path: Path, files: list[StateFile], stack: contextlib.ExitStack) -> str:
        """Open a checkpoint's files, and check that they are whole and fit this session.

        Args:
            path: the checkpoint.
            files: list that the files go into which this rank reads.
            stack: closes them.

        Returns:
            A description of the damage; empty for none.

        Raises:
            CheckpointError: it is of another session, or some ranks do not see the files that rank 0 sees.
        """
        peer = self._peer

        def check() -> tuple[str, bool]:
            try:
                manifest = patiently(lambda: Manifest.read(path))
                ranks = [peer.rank] if manifest.ranks == peer.size else range(manifest.ranks)
                first = stack.enter_context(StateFile(path / rank_file(0)))
                others = ((rank, path / rank_file(rank)) for rank in ranks)
                opened = [stack.enter_context(StateFile(at, first)) if n else first for n, at in others]
                for file in opened:
                    _check_run(manifest, file)
                files.extend(self._of_this_place(opened))
                self._check(manifest, files[0])
                # Of several ranks' files each of these ranks reads its share.
                column = self._session.island.column
                for file in files if len(files) == 1 else files[column.rank :: column.size]:
                    file.check_content(manifest.checksums[file.path.name])
            except DamagedError as error:
                return str(error), isinstance(error, MissingFileError)
            return "", False

        checked = collectively(peer, check)
        damage = of_ranks([why for why, _ in checked])
        if damage and not checked[0][0] and all(is_missing for why, is_missing in checked if why):
            raise MissingFileError("\n".join(damage))  # of another disk than rank 0's
        return "; ".join(damage)

    def _of_this_place(self, files: Sequence[StateFile]) -> Sequence[StateFile]:
        """Return the files of ranks that held the same part of a replica as this rank.

        Raises:
            CheckpointError: replicas were sharded over another number of ranks.
        """
        place, size = self._place
        saved = [file.read("session").get("island", [0, 1]) for file in files]
        for file, (_, saved_size) in zip(files, saved, strict=True):
            if saved_size != size:
                raise CheckpointError(
                    f"{file.path}: saved by {_islands(saved_size)}, and this session has {_islands(size)}: shard the "
                    "model as it was, or go by torch.distributed.checkpoint, saved within session.consensus()"
                )
        found = [file for file, (saved_place, _) in zip(files, saved, strict=True) if saved_place == place]
        if not found:
            raise CheckpointError(
                f"{files[0].path}: of another place in its island than this rank's, {place}"
            )
        return found

    @property
    def _place(self) -> list[int]:
        """Return this rank's place in its island, and the island's number of ranks."""
        island = self._session.island
        return [island.places[self._peer.rank] if island.places else 0, island.size]

    def _go_on_from(self, path: Path, files: Sequence[StateFile]) -> bool:
        """Continue from a checkpoint; return whether each rank has its own state, not the mean."""
        session, peer = self._session, self._peer
        manifest = Manifest.read(path)
        exact = manifest.ranks == peer.size
        session.enter_phase_of(manifest.step)
        if exact:
            collectively(peer, lambda: self._load_own(files[0]))
            session.replicas_equal = manifest.replicas_equal
        else:
            collectively(peer, lambda: self._load_mean(files))
        return exact

    def _find(self, missing: str) -> list[str] | None:
        """Return the directories to load, the newest first; None if there is none and the session is to begin."""
        if missing not in _MISSING:
            raise CheckpointError(
                f"session.load: missing is {missing!r}; allowed: {', '.join(map(repr, _MISSING))}"
            )
        try:
            return list(map(str, folders.newest_first(self._folder, _BEGIN_THERE)))
        except CheckpointError:
            if missing == "error":
                raise
        _warn_of_incomplete(self._folder)
        return None

    def _left_to_rank_0(self) -> list[str]:
        """Return the names of frozen parameters that are equal on all ranks, as under adapters (LoRA); collective."""
        session = self._session
        trained = {name for name, parameter in session.model.named_parameters() if parameter.requires_grad}
        held = session.tensors()["parameters"].items()
        # Tensors made of others have several names in a file.
        frozen = {name: t for name, t in held if name not in trained and not is_composite(t)}
        differing = compare(self._peer, frozen, "session.save").differing
        return [] if self._peer.rank == 0 else [name for name in frozen if name not in differing]

    def _state_dict(self, left: Sequence[str]) -> dict[str, object]:
        """Return this rank's state by sections, without the parameters that are left to rank 0."""
        session, counters = self._session, self._session.counters
        state = dict(session.state_dict())
        held: dict[str, dict[str, Tensor]] = state["model"]  # type: ignore[assignment]
        state["model"] = {
            kind: {name: tensor for name, tensor in tensors.items() if name not in left}
            for kind, tensors in held.items()
        }
        return {
            "session": {
                "step": session.step,
                "skipped_steps": session.skipped_steps,
                "island": self._place,
                "bytes_sent": counters.bytes_sent,
                "exchanges": counters.exchanges,
                "under_way_s": counters.under_way_s,
                "exposed_wait_s": counters.exposed_wait_s,
            },
            **state,
            LEFT: [f"model/parameters/{name}" for name in left],
            "random": randomness.to_plain(randomness.read(cuda=True)),
            "passes": session.epochs.state_dict(),
            "more": {name: _state_of_given(name, given) for name, given in self._more.items()},
        }

    def _load_own(self, file: StateFile) -> None:
        """Load this rank's own state."""
        session = self._session
        self._load_numbers(file)
        session.load_state(file)
        self._load_more(file.read("more"), file.path)
        now = randomness.from_plain(file.read("random"))
        session.epochs.load_state_dict(file.read("passes"), now)
        randomness.write(now)

    def _load_mean(self, files: Sequence[StateFile]) -> None:
        """Load the mean of another number of ranks."""
        first = files[0]
        self._load_numbers(first)
        self._session.load_mean(files)
        self._load_more(mean_of_section(files, "more"), first.path)
        self._session.epochs.ended = first.read("passes")["ended"]

    def _load_numbers(self, file: StateFile) -> None:
        saved, session, counters = file.read("session"), self._session, self._session.counters
        session.step, session.skipped_steps = saved["step"], saved["skipped_steps"]
        session.peer.status.note_step(session.step)
        counters.bytes_sent, counters.exchanges = saved["bytes_sent"], saved["exchanges"]
        counters.under_way_s, counters.exposed_wait_s = saved["under_way_s"], saved["exposed_wait_s"]

    def _load_more(self, saved: Mapping[str, object], path: Path) -> None:
        for name, given in self._more.items():
            load_into(given, saved[name], f"{path}: more/{name}")

    def _manifest(self, written: Sequence[Written]) -> Manifest:
        session = self._session
        return Manifest(
            run=session.run_id,
            step=session.step,
            ranks=session.size,
            replicas_equal=session.replicas_equal,
            optimizer=session.optimizers.kind,
            strategy=session.describe(),
            versions=_versions(),
            files={rank_file(rank): each.size for rank, each in enumerate(written)},
            checksums={rank_file(rank): each.checksum for rank, each in enumerate(written)},
        )

    def _check(self, manifest: Manifest, file: StateFile) -> None:
        """Refuse a checkpoint of another session, before any change."""
        session, where = self._session, file.path.parent
        if manifest.ranks == session.size:
            _compare(f"{where}: strategy", flattened(session.describe()), flattened(manifest.strategy))
        _compare(f"{where}: optimizer", {"": session.optimizers.kind}, {"": manifest.optimizer})
        expected = {
            name: describe(tensor) for name, tensor in flatten({"model": session.tensors()})[1].items()
        }
        found = {name: file.describe(name) for name in file.names("model")}
        if session.places_buffers:
            passing = {*not_persistent(session.model), *file.read("modules")["not_persistent"]}
            expected, found = comparable(expected, found, passing)
        same = manifest.ranks == session.size
        _compare(
            f"{file.path}",
            expected,
            found,
            also="" if same else f", on {manifest.ranks} ranks instead of {session.size}",
        )
        if self._more.keys() != set(file.keys("more")):
            saved, given = (
                ", ".join(sorted(names)) or "nothing" for names in (file.keys("more"), self._more)
            )
            raise CheckpointError(
                f"{where} holds, beside model and optimizer, {saved}; session.load got {given}"
            )

    def _warn_of_changes(self, path: Path, manifest: Manifest, files: Sequence[StateFile]) -> None:
        """Warn of differences from the run that saved."""
        _warn_of_incomplete(self._folder)
        running = _versions()
        for package, version in manifest.versions.items():
            if running.get(package, version) != version:
                _log.warning("%s was saved with %s %s, and %s runs", path, package, version, running[package])
        if manifest.ranks != self._peer.size:
            reason = why_no_mean(files, "optimizer")
            _log.warning(
                "%s is of %d ranks, but %d ranks run: they continue from the replicas' mean, %s the optimizer's "
                "state%s; the pass over the data that was under way begins again, with new random draws, and the state "
                "of exchanges is dropped%s. An epoch has another number of steps: check schedulers and all else "
                "that counts steps",
                path,
                manifest.ranks,
                self._peer.size,
                "without" if reason else "with the mean of",
                f" ({reason})" if reason else "",
                " but for outer parameters" if self._session.strategy.at(self._session.step).outer else "",
            )


def _state_of_given(name: str, given: Stateful) -> object:
    try:
        return given.state_dict()
    except HocketError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"more/{name}: {type(given).__name__}.state_dict failed: {type(error).__name__}: {error}"
        ) from error


def _islands(size: int) -> str:
    return "ranks with whole models" if size == 1 else f"islands of {size} ranks"


def _warn_of_incomplete(folder: Path) -> None:
    for left in folders.incomplete(folder):
        _log.warning("%s is incomplete, as a save or a copy was cut off: it is left out", left)


def _versions() -> dict[str, str]:
    plugins = {plugin.package: plugin.version for plugin in default_registry().loaded()}
    return {**plugins, "hocket-core": CORE.version, "torch": torch.__version__}


def _check_run(manifest: Manifest, file: StateFile) -> None:
    """Refuse a checkpoint that another job has written a part of."""
    if file.run != manifest.run:
        raise DamagedError(
            f"{file.path} is of run {file.run}, and {file.path.parent / MANIFEST} of run {manifest.run}: two jobs have "
            "written into one checkpoint, or files were moved"
        )
    step = file.read("session")["step"]
    if step != manifest.step:
        raise DamagedError(
            f"{file.path} is of step {step}, and {file.path.parent / MANIFEST} of {manifest.step}"
        )


def _compare(what: str, expected: Mapping[str, object], found: Mapping[str, object], also: str = "") -> None:
    differing = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    if differing:
        key = differing[0]
        others = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise CheckpointError(
            f"{what}{key and ': '}{key}: this session has {expected.get(key, 'nothing')}, the checkpoint "
            f"{found.get(key, 'nothing')}{others}: go on with what it was saved with{also}, or begin anew in "
            "another folder"
        )
