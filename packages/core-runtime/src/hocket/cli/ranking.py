"""One rank of a run, as `hocket run` starts it: `python -m hocket.cli.ranking CONFIG FOLDER [OPTION]...`.

It reads the run's file on disk again, so that the run is what its folder says.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from hocket.cli.comparing import write_report
from hocket.cli.own_disks import are_several, run_of_rank_0
from hocket.cli.streams import keep_streams
from hocket.disk import naming
from hocket.launch.forking import in_each_rank
from hocket.launch.joining import join
from hocket.pictures import NO_PICTURE
from hocket.results import METRICS, PICTURE
from hocket.results.files import write_summary
from hocket.session.save.save_point import SIGNALS
from hocket.task.user import exits_refused
from hocket.training.loop import refuse_nothing_learned, train
from hocket.training.observer import Display
from hocket.training.picture import draw
from hocket.training.run import RunConfig, load_run
from hocket.training.startup import defer_dynamo
from hocket.transport.peer import Peer
from hocket.transport.virtual import VirtualWorld

#: What sessions and transports import late: ranks that are forked share it.
_NEEDED = (
    "hocket.session.stepping_session",
    "hocket.transport.meeting",
    "hocket.transport.tcp",
    "torch.profiler",
)


def run_rank(
    run: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    display: Display = Display.LINES,
) -> None:
    """Train on this process's rank; rank 0 writes the summary and the picture."""
    peer = join(run.transport)
    _train(run, peer, folder, display, resume=resume, overwrite=overwrite)
    peer.close()


def run_virtual(
    run: RunConfig, folder: Path, *, resume: bool = False, display: Display = Display.LINES
) -> None:
    """Train on as many virtual ranks as the run asks for, in this process, one thread each."""
    assert run.ranks is not None
    torch.set_num_threads(1)
    world = VirtualWorld(run.ranks, network=run.network, seed=run.seed, timeout_s=run.timeout_s)
    with SIGNALS.listening():
        world.run(lambda: _train(run, join(), folder, display, resume=resume))


def _train(
    run: RunConfig, peer: Peer, folder: Path, display: Display, *, resume: bool, overwrite: bool = False
) -> None:
    with exits_refused(run.task.name, f" on rank {peer.rank}" if peer.size > 1 else ""):
        summary = train(run, peer, folder, resume=resume, overwrite=overwrite, display=display)
    if peer.rank == 0:
        title = f"{run.task.name}, {run.strategy.name or 'own strategy'}, {run.island.count(peer.size)}"
        write_summary(folder, summary)
        with naming(folder / PICTURE):
            drawn = draw(folder / METRICS, folder / PICTURE, title)
        if not drawn and display is not Display.QUIET:
            print(NO_PICTURE)
        if run.report:
            write_report(folder, title)
    refuse_nothing_learned(summary, peer)


def _load(config: Path) -> RunConfig | None:
    """Read the run's file, and import for all ranks what they need; None where another host has the file."""
    if are_several() and not config.exists():
        return None
    run = load_run(str(config))
    for name in _NEEDED:
        import_module(name)
    if run.island.ranks > 1:
        import_module("torch.distributed.fsdp")
    return run


def _main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--display", type=Display, default=Display.LINES)
    given = parser.parse_args(arguments)
    run = in_each_rank(partial(_load, given.config))
    if are_several():
        run = run_of_rank_0(join(None if run is None else run.transport), run, given.config)
    assert run is not None
    run_rank(run, given.folder, resume=given.resume, overwrite=given.overwrite, display=given.display)


if __name__ == "__main__":
    keep_streams()
    defer_dynamo()
    _main(sys.argv[1:])
