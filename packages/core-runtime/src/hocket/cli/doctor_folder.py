"""The part of `hocket doctor` that checks a folder for runs: whether all ranks see what rank 0 writes there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hocket.checkpoint.folder import complete
from hocket.checkpoint.shared import LATE_S, ranks_that_see, try_to_write
from hocket.cli.finding import Finding
from hocket.errors import CheckpointError
from hocket.results import CHECKPOINTS
from hocket.transport.peer import Peer, gather


def shared_folder(peer: Peer, folder: Path) -> Iterator[Finding]:
    """Yield the findings on a folder for runs, a line for each host that does not see it; collective."""
    try:
        where, ranks = ranks_that_see(peer, folder)
    except CheckpointError as error:
        yield Finding.problem("folder", f"rank 0 cannot write there: {error}")
        return
    yield from _earlier(peer, folder)
    if peer.size == 1:
        yield Finding.ok(
            "folder",
            f"{where} can be written; under a launcher (`mpiexec hocket doctor --out`, `torchrun --no-python hocket "
            "doctor --out`, `srun hocket doctor --out`) all ranks look there",
        )
        return
    blind: dict[tuple[str, str], list[int]] = {}
    for rank, (sees, host, place) in enumerate(ranks):
        if not sees:
            blind.setdefault((host, place), []).append(rank)
    for (host, place), of_host in blind.items():
        whose = f"rank{'s' * (len(of_host) > 1)} {', '.join(map(str, of_host))}"
        yield Finding.note(
            "folder",
            f"{place} on {host} does not show the files that rank 0 writes into {where} ({whose} looked for "
            f"{LATE_S:g} s): each host keeps the checkpoints of its ranks, and session.load and `hocket "
            "resume` fetch missing files from other hosts",
        )
    if not blind:
        yield Finding.ok("folder", f"all {peer.size} ranks see the files that rank 0 writes into {where}")


def _earlier(peer: Peer, folder: Path) -> Iterator[Finding]:
    """Yield a finding for each place that a rank cannot write, and for each that holds checkpoints; collective."""
    try:
        try_to_write(peer, folder)
    except CheckpointError as error:
        for line in str(error).splitlines():
            yield Finding.problem("folder", line)
    saved = [path for each in (folder, folder / CHECKPOINTS) for path in complete(each)]
    holds = (
        f"{saved[-1].parent.absolute()} on {peer.memory.host_name} holds {saved[-1].name}" if saved else ""
    )
    for place in dict.fromkeys(filter(None, gather(peer, holds))):
        yield Finding.note(
            "folder",
            f"{place} of an earlier run: `hocket resume` and session.load continue it; another run needs another "
            "folder, or `hocket run --overwrite`",
        )
