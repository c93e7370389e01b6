"""Runs on several hosts that may share no disk.

Rank 0's host has the run's configuration, its starts and its rows of metrics. Ranks on other hosts get the
configuration from rank 0. Where a run goes on and rank 0 is on another host than before, these files come to it from
the host that has them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from hocket.checkpoint.collectively import on_rank_0, on_ranks
from hocket.checkpoint.folder import complete
from hocket.cli.folders import load_resumed
from hocket.disk import write_text
from hocket.errors import UserError
from hocket.launch.joining import join, launched
from hocket.own_files import adopt, claim, remember, remembered
from hocket.plain import Tree
from hocket.results import CHECKPOINTS, CONFIG, METRICS, STARTS
from hocket.results.kept_config import read_config
from hocket.results.provenance import starts_in
from hocket.training.run import RunConfig, load_run, resolved
from hocket.transport.peer import Peer, gather

#: The files that come to rank 0's host, in the order in which they are written: whether all came is told by the last.
_FILES = (METRICS, CONFIG, STARTS)


def are_several() -> bool:
    """Return whether this process is a rank of a launcher that may have started others on other hosts."""
    found = launched()
    return found is not None and found.size > found.local_size


def was_restarted(out: Path) -> bool:
    """Return whether torchrun restarts a job that has left a checkpoint; collective on several hosts."""
    found = launched()
    own = found is not None and found.restarts > 0 and bool(complete(out / CHECKPOINTS))
    if found is not None and found.launcher == "torchrun" and are_several():
        # Each host counts its own restarts, and a new one has none.
        return any(gather(join(), own, what="a look for checkpoints"))
    return own


def resumed_run(folder: Path, overrides: Sequence[str], transport: str | None) -> RunConfig:
    """Join the other ranks, and return the run that continues the one in a folder.

    Each host may have a part of the folder.

    Args:
        folder: the folder of the run's results.
        overrides: the settings that change.
        transport: the ranks' transport; None for the one that the run had.

    Raises:
        UserError: there is nothing to continue, or it would be another run.
        CheckpointError: on all ranks: what rank 0's host lacks cannot be read, or written there.
    """
    path = folder / CONFIG
    peer = join(transport or (read_config(path).get("transport") if path.exists() else None))
    _bring(peer, folder)
    saved = gather(peer, bool(complete(folder / CHECKPOINTS)), what="a look for checkpoints")
    settings = on_rank_0(peer, lambda: resolved(load_resumed(folder, overrides, elsewhere=any(saved))))
    return load_run(settings)


def run_of_rank_0(peer: Peer, run: RunConfig | None, config: Path) -> RunConfig:
    """Return the run whose configuration rank 0 has read; collective.

    Args:
        peer: all ranks.
        run: the run that this rank has read; None where its host does not have the file.
        config: the file.

    Raises:
        UserError: rank 0's host does not have it.
    """
    own = resolved(run) if run is not None and peer.rank == 0 else None
    settings = gather(peer, own, what="the run's configuration")[0]
    if settings is None:
        host = gather(peer, peer.memory.host_name)[0]
        raise UserError(
            f"{config.absolute()} is not on {host}, where rank 0 would write the run's results: put the host on which "
            "you call `hocket run` first in --hosts, or use a folder that all hosts see"
        )
    return load_run(settings)


def _bring(peer: Peer, folder: Path) -> None:
    """Bring a run's own files to rank 0's host, if that has older ones or none.

    They come from the first rank that sees the newest ones, which name the most starts. Another run's are left alone.

    Raises:
        UserError: no host has a run there; says where ranks have looked.
    """
    kept = gather(peer, _kept(folder), what="a look for the run")
    source = max(range(peer.size), key=lambda rank: len(kept[rank]))
    if not kept[source]:
        places = gather(peer, f"{folder.absolute()} on {peer.memory.host_name}")
        looked = ", ".join(dict.fromkeys(places))
        raise UserError(f"{folder} holds no run to resume: no host has {CONFIG} there (looked for {looked})")
    if source == 0 or kept[source][: len(kept[0])] != kept[0]:
        return
    [texts] = on_ranks(peer, [source], lambda: _read(folder))
    on_rank_0(peer, lambda: _write(folder, texts))


def _kept(folder: Path) -> list[str]:
    """Return a text for a run's configuration, and one for each of its starts; none without a run."""
    if not (folder / CONFIG).exists():
        return []
    texts = [json.dumps(start, sort_keys=True) for start in starts_in(folder)]
    return [CONFIG, *(hashlib.sha256(text.encode()).hexdigest() for text in texts)]


def _read(folder: Path) -> Tree:
    """Return the texts of a run's own files, and those that its configuration may have."""
    files = {name: (folder / name).read_text() for name in _FILES if (folder / name).exists()}
    return {"files": files, "allowed": list(remembered(folder, CONFIG))}


def _write(folder: Path, texts: Tree) -> None:
    """Write what `_read` returned on another host, beside its ranks' checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, *texts["files"])
    adopt(folder, [CHECKPOINTS] if os.path.lexists(folder / CHECKPOINTS) else [])
    remember(folder, CONFIG, texts["allowed"])
    for name, text in texts["files"].items():
        write_text(folder / name, text)
