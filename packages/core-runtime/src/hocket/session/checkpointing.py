"""`session.save` and `session.load`: the order in which ranks write and read, and what they refuse."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket import randomness
from hocket.checkpoint import folder as folders
from hocket.checkpoint.collectively import collectively, on_rank_0
from hocket.checkpoint.manifest import MANIFEST, Manifest, rank_file
from hocket.checkpoint.mean import mean_of_section, why_no_mean
from hocket.checkpoint.tensor_file import StateFile, describe, write_state
from hocket.checkpoint.tree import flatten
from hocket.errors import CheckpointError, HocketError
from hocket.plugin import core_version, default_registry
from hocket.session.ranks import flattened
from hocket.session.state import load_into

if TYPE_CHECKING:
    from hocket.session.api import TrainingSession

__all__ = ["Resumed", "load_session", "save_session"]

_log = logging.getLogger("hocket")


@dataclass(frozen=True)
class Resumed:
    """What a session continues from.

    Attributes:
        path: the checkpoint's directory.
        step: how many steps had ended.
        epoch: how many passes over `session.data` had ended: the number of the one to continue, or to begin, from 0.
        exact: whether everything was restored, rank by rank; else the ranks continue from the replicas' mean, and
            the pass that was under way begins again.
    """

    path: Path
    step: int
    epoch: int
    exact: bool


def save_session(session: TrainingSession, folder: Path, keep: int | None, more: Mapping[str, Any]) -> Path:
    """Carry out `Session.save`."""
    session.end_step_to_save()
    peer, step = session.peer, session.step
    steps = session.gather(step)
    if any(of_rank != step for of_rank in steps):
        told = ", ".join(f"{of_rank} on rank {rank}" for rank, of_rank in enumerate(steps))
        raise CheckpointError(f"the ranks save different steps: {told}. All ranks save after the same step")

    with contextlib.ExitStack() as stack:  # what rank 0 holds meanwhile

        def begin() -> tuple[str, str]:
            path = stack.enter_context(folders.begin(folder, step, session.run_id, session.saved))
            return path.name, session.run_id

        name, run = on_rank_0(peer, begin)
        path = folder / name
        sizes = collectively(
            peer, lambda: write_state(path / rank_file(peer.rank), _state_of(session, more), run)
        )

        def end() -> str:
            _manifest(session, sizes).write(path)
            session.saved = folders.finish(path)
            if keep is not None:
                folders.keep_newest(folder, keep, run)
            stack.close()  # before any rank goes on
            return session.saved.name

        return folder / on_rank_0(peer, end)


def load_session(session: TrainingSession, folder: Path, more: Mapping[str, Any]) -> Resumed:
    """Carry out `Session.load`."""
    peer = session.peer
    path = Path(on_rank_0(peer, lambda: str(folders.latest_complete(folder))))
    with contextlib.ExitStack() as stack:
        files: list[StateFile] = []

        def check() -> None:
            manifest = Manifest.read(path)
            ranks = [peer.rank] if manifest.ranks == peer.size else range(manifest.ranks)
            files.extend(stack.enter_context(StateFile(path / rank_file(rank))) for rank in ranks)
            for file in files:
                _check_run(manifest, file)
            _check(session, manifest, files[0], more)

        collectively(peer, check)
        manifest = Manifest.read(path)
        exact = manifest.ranks == peer.size
        session.enter_phase_of(manifest.step)
        if exact:
            collectively(peer, lambda: _load_own(session, files[0], more))
            session.replicas_equal = manifest.replicas_equal
        else:
            collectively(peer, lambda: _load_mean(session, files, more))
        if peer.rank == 0:
            _tell(folder, path, manifest, files, peer.size)
    return Resumed(path, session.step, session.epochs.ended, exact)


def _state_of(session: TrainingSession, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's state by sections."""
    counters = session.counters
    return {
        "session": {
            "step": session.step,
            "skipped_steps": session.skipped_steps,
            "bytes_sent": counters.bytes_sent,
            "exchanges": counters.exchanges,
            "under_way_s": counters.overlap.under_way_s,
            "exposed_wait_s": counters.overlap.exposed_wait_s,
        },
        **session.state_dict(),
        "random": randomness.to_plain(randomness.read(cuda=True)),
        "passes": session.epochs.state_dict(),
        "more": {name: _state_of_given(name, given) for name, given in more.items()},
    }


def _state_of_given(name: str, given: Any) -> Any:
    try:
        return given.state_dict()
    except HocketError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"more/{name}: {type(given).__name__}.state_dict failed: {type(error).__name__}: {error}"
        ) from error


def _load_own(session: TrainingSession, file: StateFile, more: Mapping[str, Any]) -> None:
    """Continue where this rank was."""
    _load_numbers(session, file)
    session.load_state(file)
    saved = file.read("more")
    for name, given in more.items():
        load_into(given, saved[name], f"{file.path}: more/{name}")
    now = randomness.from_plain(file.read("random"))
    session.epochs.load_state_dict(file.read("passes"), now)
    randomness.write(now)


def _load_mean(session: TrainingSession, files: Sequence[StateFile], more: Mapping[str, Any]) -> None:
    """Continue from the mean of another number of ranks."""
    first = files[0]
    _load_numbers(session, first)
    session.load_mean(files)
    saved = mean_of_section(files, "more")
    for name, given in more.items():
        load_into(given, saved[name], f"{first.path}: more/{name}")
    session.epochs.ended = first.read("passes")["ended"]


def _load_numbers(session: TrainingSession, file: StateFile) -> None:
    saved, counters = file.read("session"), session.counters
    session.step, session.skipped_steps = saved["step"], saved["skipped_steps"]
    counters.bytes_sent, counters.exchanges = saved["bytes_sent"], saved["exchanges"]
    counters.overlap.under_way_s, counters.overlap.exposed_wait_s = (
        saved["under_way_s"],
        saved["exposed_wait_s"],
    )


def _manifest(session: TrainingSession, sizes: Sequence[int]) -> Manifest:
    return Manifest(
        run=session.run_id,
        step=session.step,
        ranks=session.size,
        replicas_equal=session.replicas_equal,
        optimizer=session.optimizers.kind,
        strategy=session.describe(),
        versions=_versions(),
        files={rank_file(rank): size for rank, size in enumerate(sizes)},
    )


def _versions() -> dict[str, str]:
    plugins = {plugin.package: plugin.version for plugin in default_registry().loaded()}
    return {**plugins, "hocket-core": core_version(), "torch": torch.__version__}


def _check_run(manifest: Manifest, file: StateFile) -> None:
    """Refuse a checkpoint of which another job has written a part."""
    if file.run != manifest.run:
        raise CheckpointError(
            f"{file.path} is of run {file.run}, and {file.path.parent / MANIFEST} of run {manifest.run}: two jobs have "
            "written into one checkpoint, or files were moved. Use another checkpoint"
        )


def _check(session: TrainingSession, manifest: Manifest, file: StateFile, more: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of something else, before anything is changed."""
    where = file.path.parent
    if manifest.ranks == session.size:
        _compare(f"{where}: strategy", flattened(session.describe()), flattened(manifest.strategy))
    _compare(f"{where}: optimizer", {"": session.optimizers.kind}, {"": manifest.optimizer})
    expected = {name: describe(tensor) for name, tensor in flatten({"model": session.tensors()})[1].items()}
    found = {name: file.describe(name) for name in file.names("model")}
    _compare(f"{file.path}", expected, found)
    if more.keys() != set(file.keys("more")):
        saved, given = (", ".join(sorted(names)) or "nothing" for names in (file.keys("more"), more))
        raise CheckpointError(
            f"{where} holds, beside model and optimizer, {saved}; session.load was given {given}"
        )


def _compare(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    differing = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    if differing:
        key = differing[0]
        others = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise CheckpointError(
            f"{what}{key and ': '}{key}: expected {expected.get(key, 'nothing')}, found {found.get(key, 'nothing')}"
            f"{others}"
        )


def _tell(folder: Path, path: Path, manifest: Manifest, files: Sequence[StateFile], size: int) -> None:
    """Say what is not as it was."""
    for left in folders.incomplete(folder):
        _log.warning("%s is incomplete, a save was cut off: it is left out", left)
    running = _versions()
    for package, version in manifest.versions.items():
        if running.get(package, version) != version:
            _log.warning("%s was saved with %s %s, and %s runs", path, package, version, running[package])
    if manifest.ranks != size:
        reason = why_no_mean(files, "optimizer")
        _log.warning(
            "%s is of %d ranks, and %d run: they continue from the replicas' mean, %s the optimizer's state%s; the "
            "pass over the data that was under way begins again, with new random draws, and what exchanges kept "
            "between rounds is dropped",
            path,
            manifest.ranks,
            size,
            "without" if reason else "with the mean of",
            f" ({reason})" if reason else "",
        )
