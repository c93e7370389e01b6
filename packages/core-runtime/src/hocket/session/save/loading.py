"""The loading of a session from a checkpoint: each rank's own state, or the mean of another number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hocket import randomness
from hocket.checkpoint import folder as folders
from hocket.checkpoint.collectively import collectively, in_words, of_ranks
from hocket.checkpoint.fetching import fetch, needed
from hocket.checkpoint.files import StateFile
from hocket.checkpoint.manifest import Manifest, rank_file
from hocket.checkpoint.means import mean_of_section, why_no_mean
from hocket.checkpoint.shared import leaders_of, patiently
from hocket.errors import CheckpointError, DamagedError, MissingFileError, some
from hocket.plain import Stateful
from hocket.session.save.checks import of_this_place, require_fit, require_run
from hocket.session.save.replica_state import load_into
from hocket.session.save.saving import versions
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession

_log = logging.getLogger("hocket")

#: What `session.load` may do where there is no complete checkpoint.
_MISSING = ("error", "start")
_BEGIN_THERE = "To begin at step 0, call session.load(..., missing='start'); or name another folder"

#: How often a rank may find that it lacks a file: its own, and then rank 0's, which its own refers to.
_FETCHES = 3


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


class Loading:
    """The loading of a session from a folder of checkpoints; collective.

    Args:
        session: the session to load into.
        folder: of checkpoints.
        more: other objects with `state_dict` and `load_state_dict`, by name.
    """

    def __init__(self, session: EngineSession, folder: Path, more: Mapping[str, Stateful]) -> None:
        self._session, self._folder, self._more = session, folder, more
        self._peer = session.peer

    def load(self, missing: str) -> Resumed:
        """Carry out `session.load`."""
        session, peer = self._session, self._peer
        passed: list[tuple[Path, str]] = []
        for path in self._find(missing):
            with contextlib.ExitStack() as stack:
                files: list[StateFile] = []
                damage = self._open(path, files, stack)
                if damage:
                    passed.append((path, damage))
                    continue
                manifest = Manifest.read(path, ())
                exact = manifest.ranks == self._peer.size
                self.go_on_from(manifest, files, exact=exact)
                session.passed_over = [damaged for damaged, _ in passed]
                if peer.rank == 0:
                    for damaged, why in passed:
                        _log.warning("%s is passed over: %s", damaged, why)
                    self._warn_of_changes(path, manifest, files)
            return Resumed(path, session.step, session.epochs.ended, exact)
        if not passed:
            return Resumed(None, session.step, session.epochs.ended, exact=True)
        others = (
            f"older ones are not complete ({some([path.name for path, _ in passed[1:]])})"
            if passed[1:]
            else ""
        )
        raise DamagedError(
            f"{passed[0][1]}; {others or 'there is no older one'}: restore the files, or start again in another folder"
        )

    def _find(self, missing: str) -> list[Path]:
        """Return the directories to load, the newest first; none if there is none and the session is to begin.

        They are those of all hosts: a folder that some ranks share may have been lost, or lack the newest.
        """
        if missing not in _MISSING:
            raise CheckpointError(
                f"session.load: missing is {missing!r}; allowed: {', '.join(map(repr, _MISSING))}"
            )
        why = ""
        names: list[str] = []
        try:
            found = folders.newest_first(self._folder, _BEGIN_THERE)
            names = ["" if path == self._folder else path.name for path in found]
        except (CheckpointError, OSError) as error:
            why = in_words(error)
        seen = gather(self._peer, [names, why], what="session.load")
        every = {name for of_rank, _ in seen for name in of_rank}
        if not every and missing == "error":
            raise CheckpointError("\n".join(of_ranks([of_rank for _, of_rank in seen])))
        if not every and self._peer.rank == 0:
            _warn_of_incomplete(self._folder)
        paths = [self._folder / name for name in every]
        return paths if "" in every else sorted(paths, key=folders.order, reverse=True)

    def _open(self, path: Path, files: list[StateFile], stack: contextlib.ExitStack) -> str:
        """Open a checkpoint's files, and check that they are whole and fit this session.

        What this rank's folder lacks is fetched from ranks that have it.

        Args:
            path: the checkpoint.
            files: list that the files go into which this rank reads.
            stack: closes them.

        Returns:
            A description of the damage; empty for none.

        Raises:
            CheckpointError: it is of another session, or what is fetched cannot be written.
        """
        session, peer = self._session, self._peer

        def check() -> tuple[str, bool]:
            try:
                self._check(path, files, stack)
            except DamagedError as error:
                return str(error), isinstance(error, MissingFileError)
            return "", False

        for _ in range(_FETCHES):
            checked = collectively(peer, check)
            damage = "; ".join(of_ranks([why for why, _ in checked]))
            if not damage or not all(is_missing for why, is_missing in checked if why):
                return damage
            nowhere = fetch(peer, session.control, path, lambda: self._leaders(path.parent))
            if nowhere:
                return nowhere
        return damage

    def _leaders(self, folder: Path) -> Sequence[int]:
        self._session.leaders[folder] = leaders_of(self._peer, folder)
        return self._session.leaders[folder]

    def _check(self, path: Path, files: list[StateFile], stack: contextlib.ExitStack) -> None:
        """Open the files that this rank reads, and check them."""
        session, peer = self._session, self._peer

        @cache
        def first() -> StateFile:
            return stack.enter_context(StateFile(path / rank_file(0)))

        def manifest_and_files() -> Manifest:
            return Manifest.read(path, needed(Manifest.read(path, ()), path, peer.rank, peer.size))

        manifest = patiently(manifest_and_files)
        ranks = [peer.rank] if manifest.ranks == peer.size else range(manifest.ranks)
        opened = [stack.enter_context(StateFile(path / rank_file(rank), first)) for rank in ranks]
        for file in opened:
            require_run(manifest, file)
        files[:] = of_this_place(session, opened)
        require_fit(session, manifest, files[0], self._more)
        # Of several ranks' files each of these ranks reads its share.
        column = session.island.column
        for file in files if len(files) == 1 else files[column.rank :: column.size]:
            file.check_content(manifest.checksums[file.path.name])

    def go_on_from(self, manifest: Manifest, files: Sequence[StateFile], *, exact: bool) -> None:
        """Continue from a checkpoint; collective.

        Args:
            manifest: its description.
            files: this rank's own state, or else the states of which it takes the mean.
            exact: whether each rank takes its own.
        """
        session, peer = self._session, self._peer
        session.enter_phase_of(manifest.step)
        if exact:
            collectively(peer, lambda: self._load_own(files[0]))
            session.replicas_equal = manifest.replicas_equal
        else:
            collectively(peer, lambda: self._load_mean(files))

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

    def _warn_of_changes(self, path: Path, manifest: Manifest, files: Sequence[StateFile]) -> None:
        """Warn of differences from the run that saved."""
        _warn_of_incomplete(self._folder)
        running = versions()
        for package, version in manifest.versions.items():
            if running.get(package, version) != version:
                _log.warning("%s was saved with %s %s; this is %s", path, package, version, running[package])
        if manifest.ranks != self._peer.size:
            reason = why_no_mean(files, "optimizer")
            _log.warning(
                "%s was saved by %d ranks, but %d ranks run. Check schedulers and everything else that counts "
                "steps: an epoch now has a different number of steps. Training continues from the replicas' mean, %s "
                "the optimizer's state%s. The interrupted pass over the data begins again, with new random draws. The "
                "state of exchanges is dropped%s",
                path,
                manifest.ranks,
                self._peer.size,
                "without" if reason else "with the mean of",
                f" ({reason})" if reason else "",
                " except for outer parameters" if self._session.strategy.at(self._session.step).outer else "",
            )


def _warn_of_incomplete(folder: Path) -> None:
    for left in folders.incomplete(folder):
        _log.warning("%s is incomplete, because a save or a copy was interrupted: it is skipped", left)
