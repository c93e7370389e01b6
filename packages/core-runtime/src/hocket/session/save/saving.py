"""A save of a session: a rank's state, the order in which ranks write, and the manifest."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket import randomness
from hocket.checkpoint import folder as folders
from hocket.checkpoint.collectively import collectively, on_ranks
from hocket.checkpoint.files import LEFT, Prepared, prepare, write_prepared
from hocket.checkpoint.host_copies import HostCopies
from hocket.checkpoint.manifest import Manifest, rank_file
from hocket.checkpoint.shared import leaders_of, patiently, require_folder
from hocket.checkpoint.subclasses import is_composite
from hocket.errors import CheckpointError, HocketError
from hocket.plain import Stateful
from hocket.plugin import CORE, default_registry
from hocket.session.exchange.checksums import compare
from hocket.session.save.beside_training import Acts, BesideTraining, at_once

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession


def check_keep(call: str, keep: int | None) -> None:
    """Refuse a number of checkpoints that would leave none, alike on all ranks.

    Raises:
        CheckpointError: says what is allowed.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"{call}: keep is {keep}; allowed: 1 or more, or None to keep all")


def save(
    session: EngineSession,
    folder: Path,
    more: Mapping[str, Stateful],
    *,
    keep: int | None,
    blocking: bool,
) -> Path:
    """Carry out `session.save`."""
    with session.trained_values():
        path, acts = _begin(session, folder, more, keep, blocking=blocking)
        if blocking or session.beside_training is None:
            return at_once(session.peer, acts)
    session.beside_training.begin(acts, session.step)
    return path


def _begin(
    session: EngineSession, folder: Path, more: Mapping[str, Stateful], keep: int | None, *, blocking: bool
) -> tuple[Path, Acts]:
    """Begin a save after the present step; collective.

    Returns:
        The checkpoint's directory once it is complete, and the acts that are left.
    """
    peer = session.peer
    session.end_step_to_save()
    run, is_known = _agree(session, folder)
    if session.beside_training is not None:
        session.beside_training.finish()
    elif not blocking:
        session.beside_training = BesideTraining(peer)
    session.compare_replicas("session.save")
    if not is_known:
        session.leaders[folder] = leaders_of(peer, folder)
    leaders = session.leaders[folder]
    with contextlib.ExitStack() as stack:  # locks that leaders hold meanwhile

        def begin() -> tuple[str, int]:
            path = stack.enter_context(
                folders.begin(folder, session.step, run, session.saved, session.passed_over)
            )
            session.passed_over = ()
            return path.name, folders.next_number(path)

        begun = on_ranks(peer, sorted({*leaders}), begin)
        path, number = folder / begun[0][0], max(number for _, number in begun)
        collectively(peer, lambda: require_folder(path))
        copies = None if blocking or session.beside_training is None else session.beside_training.copies
        content = _content(session, more, run, copies)
        held = [rank_file(rank) for rank, leader in enumerate(leaders) if leader == peer.rank]
        acts = _acts(session, path, number, held, manifest_of(session, run), content, keep, stack.pop_all())
        return folders.final_path(path, number), acts


def _content(
    session: EngineSession, more: Mapping[str, Stateful], run: str, copies: HostCopies | None
) -> Callable[[], Prepared]:
    """Return a function that gives the content of this rank's file: the state itself, or a copy made now."""
    left = _left_to_rank_0(session)

    def as_it_is() -> Prepared:
        return prepare(content_of(session, more, left), run)

    if copies is None:
        return as_it_is
    copied: list[Callable[[], Prepared]] = []

    def copy() -> None:
        header, tensors = as_it_is()
        own, wait = copies.take(tensors)

        def when_copied() -> Prepared:
            wait()
            return Prepared(header, own)

        copied.append(when_copied)

    collectively(session.peer, copy)
    return copied[0]


def _acts(
    session: EngineSession,
    path: Path,
    number: int,
    held: Sequence[str],
    manifest: Manifest,
    content: Callable[[], Prepared],
    keep: int | None,
    begun: contextlib.ExitStack,
) -> Acts:
    """Yield the acts of a save that has begun: each rank's file, the manifest, and the final name.

    Args:
        path, number: the checkpoint's directory meanwhile, and the least number in its final name.
        held: the files in this folder, if this rank is the first that has it; else none.
        manifest, content: the manifest without files, and a function that returns what is in this rank's file.
        begun: undoes the save if it fails.
    """
    rank = session.peer.rank
    with begun:
        written = yield lambda: [*write_prepared(path / rank_file(rank), content()), socket.gethostname()]
        whole = _with_files(manifest, written)
        yield lambda: patiently(lambda: whole.write(path, held)) if held else None

        def finish() -> str | None:
            if not held:
                return None
            session.saved = folders.finish(path, number)
            return session.saved.name

        names = yield finish

        def clean_up() -> None:  # once the checkpoint is complete on all hosts
            if held and keep is not None:
                folders.keep_newest(path.parent, keep, manifest.run)
            begun.close()  # before any rank goes on

        yield clean_up
        name: str = names[0]
        return path.parent / name


def _agree(session: EngineSession, folder: Path) -> tuple[str, bool]:
    """Refuse a save of ranks at different steps; collective.

    Returns:
        Rank 0's run, which is the checkpoint's; and whether all ranks know who has the same folder.
    """
    gathered = session.gathered([session.step, session.run_id, folder in session.leaders], "session.save")
    steps = [step for step, _, _ in gathered]
    if any(of_rank != session.step for of_rank in steps):
        each = ", ".join(f"{of_rank} on rank {rank}" for rank, of_rank in enumerate(steps))
        raise CheckpointError(
            f"the ranks save different steps: {each}. All ranks must save after the same step"
        )
    return gathered[0][1], all(knows for _, _, knows in gathered)


def place_of(session: EngineSession) -> list[int]:
    """Return this rank's place in its island, and the island's number of ranks."""
    island = session.island
    return [island.places[session.peer.rank] if island.places else 0, island.size]


def _left_to_rank_0(session: EngineSession) -> list[str]:
    """Return the names of frozen parameters that are equal on all ranks, as under adapters (LoRA); collective."""
    trained = {name for name, parameter in session.model.named_parameters() if parameter.requires_grad}
    held = session.tensors()["parameters"].items()
    # Tensors made of others have several names in a file.
    frozen = {name: t for name, t in held if name not in trained and not is_composite(t)}
    differing = compare(session.peer, frozen, "session.save").differing
    return [] if session.peer.rank == 0 else [name for name in frozen if name not in differing]


def content_of(
    session: EngineSession, more: Mapping[str, Stateful], left: Sequence[str]
) -> dict[str, object]:
    """Return this rank's state by sections, without the parameters that are left to rank 0."""
    counters = session.counters
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
            "island": place_of(session),
            "bytes_sent": counters.bytes_sent,
            "exchanges": counters.exchanges,
            "under_way_s": counters.under_way_s,
            "exposed_wait_s": counters.exposed_wait_s,
        },
        **state,
        LEFT: [f"model/parameters/{name}" for name in left],
        "random": randomness.to_plain(randomness.read(cuda=True)),
        "passes": session.epochs.state_dict(),
        "more": {name: _state_of_given(name, given) for name, given in more.items()},
    }


def _state_of_given(name: str, given: Stateful) -> object:
    if not hasattr(given, "state_dict"):
        raise CheckpointError(
            f"session.save(..., {name}=...): {type(given).__name__} has no state_dict: give objects with state_dict "
            "and load_state_dict, such as schedulers. session.load returns the step and the epoch by itself"
        )
    try:
        return given.state_dict()
    except HocketError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"more/{name}: {type(given).__name__}.state_dict failed: {type(error).__name__}: {error}"
        ) from error


def manifest_of(session: EngineSession, run: str) -> Manifest:
    """Return the manifest of what is saved now, without files."""
    return Manifest(
        run=run,
        step=session.step,
        ranks=session.size,
        replicas_equal=session.replicas_equal,
        optimizer=session.optimizers.kind,
        strategy=session.describe(),
        versions=versions(),
        files={},
        checksums={},
        hosts={},
    )


def _with_files(manifest: Manifest, written: Sequence[tuple[int, int, str]]) -> Manifest:
    """Return a manifest with each rank's file: its size, its checksum, and the host that wrote it."""
    names = [rank_file(rank) for rank in range(len(written))]
    sizes, checksums, hosts = (dict(zip(names, each, strict=True)) for each in zip(*written, strict=True))
    return replace(manifest, files=sizes, checksums=checksums, hosts=hosts)


def versions() -> dict[str, str]:
    """Return the versions of the packages that a checkpoint depends on."""
    plugins = {plugin.package: plugin.version for plugin in default_registry().loaded()}
    return {**plugins, "hocket-core": CORE.version, "torch": torch.__version__}
