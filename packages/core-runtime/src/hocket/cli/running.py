"""`hocket run`: start the ranks, or be one of them, and say where the results lie."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hocket.checkpoint.folder import complete, latest_complete
from hocket.config.run import RunConfig, load_run
from hocket.config.settings import TransportName
from hocket.errors import UserError
from hocket.training import CHECKPOINTS, TRACE_FILE
from hocket.training.observer import TERMINAL_VARIABLE
from hocket.transport.job_folder import job_folder, shared_job_folder
from hocket.transport.joining import launched_ranks, local_ranks
from hocket.transport.launching import find_mpiexec, launch, threads_per_rank

__all__ = ["run_command"]

#: What a resumed run has in common with the one that was interrupted; the checkpoint knows the strategy.
_FIXED = ("task", "optimizer", "schedulers", "engine", "batch_size", "seed", "on_nonfinite")


def run_command(
    target: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    transport: str | None,
    out: Path | None,
    trace: bool,
    resume: bool,
) -> int:
    """Carry out `hocket run` and return the exit status.

    Raises:
        UserError: whatever is wrong with what was asked for.
    """
    run = load_run(target, overrides)
    if transport is not None:
        run = replace(run, transport=TransportName(transport))
    if trace:
        run = replace(run, trace=True)
    if run.transport is TransportName.TORCH:
        raise UserError("transport torch is not available in this version; there are mpi and virtual")
    if resume and out is None:
        raise UserError("--resume continues the run in a folder: name it with --out")
    launched = launched_ranks()
    if launched is not None:
        return _join(run, ranks or run.ranks, out, resume, *launched)
    run = replace(run, ranks=ranks or run.ranks or 1)
    assert run.ranks is not None
    run.check_size(run.ranks)
    from hocket.cli.checking import check_run

    check_run(run).data(run.seed)
    folder = _prepare_folder(out, run, resume)
    status = 1
    try:
        if run.transport is TransportName.VIRTUAL:
            from hocket.cli.ranking import run_virtual

            run_virtual(run, folder, resume=resume)
            status = 0
        elif run.ranks == 1:
            from hocket.cli.ranking import run_rank

            run_rank(run, folder, resume=resume)
            status = 0
        else:
            status = _launch(run, folder, resume)
    finally:
        if status != 0 and run.trace:
            _show_left_trace(folder)
    if status == 0:
        _show_results(folder)
    return status


def _show_left_trace(folder: Path) -> None:
    """Make a trace of what the ranks of a failed run have left of it."""
    from hocket.observation import merge_left

    path = folder / TRACE_FILE
    if merge_left(path):
        print(f"hocket: the trace of what the ranks did until then: {os.path.relpath(path)}", file=sys.stderr)


def _join(
    run: RunConfig, asked: int | None, out: Path | None, resume: bool, launcher: str, promised: int
) -> int:
    """Be one of the ranks that a launcher has started."""
    from hocket.cli.ranking import run_rank

    if asked is not None and asked != promised:
        raise UserError(
            f"{launcher} started {promised} ranks, but {asked} were asked for: leave out -n and `ranks`"
        )
    if run.transport is not TransportName.MPI:
        raise UserError(
            f"{launcher} starts ranks for transport mpi, not {run.transport}: leave out the launcher"
        )
    run = replace(run, ranks=promised)
    run.check_size(promised)

    import torch

    from hocket.transport import join

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(local_ranks()))
    first = join().rank == 0
    # The others write nothing, and their clocks may give another name.
    folder = _prepare_folder(out, run, resume) if first else _folder(out, run)
    run_rank(run, folder, resume=resume)
    if first:
        _show_results(folder)
    return 0


def _launch(run: RunConfig, folder: Path, resume: bool) -> int:
    environment = {}
    if sys.stdout.isatty():
        environment = {TERMINAL_VARIABLE: "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    program = [sys.executable, "-m", "hocket.cli.ranking", str(folder / "config.yaml"), str(folder)]
    program += ["--resume"] if resume else []
    assert run.ranks is not None
    with job_folder(Path(tempfile.gettempdir())) as pids, shared_job_folder() as variables:
        environment |= variables
        return launch(find_mpiexec(), run.ranks, program, folder=pids, environment=environment)


def _folder(out: Path | None, run: RunConfig) -> Path:
    return out or Path("runs") / f"{run.strategy.name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def _prepare_folder(out: Path | None, run: RunConfig, resume: bool) -> Path:
    """Make the results' folder, with the run's complete configuration in it, or check that its run can go on."""
    from hocket.config.run import resolved

    folder, config = _folder(out, run), resolved(run)
    if resume:
        _check_resumable(folder, config)
    elif complete(folder / CHECKPOINTS):
        raise UserError(
            f"--out {folder} holds the checkpoints of an earlier run: continue it with --resume, or name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return folder


def _check_resumable(folder: Path, config: dict[str, Any]) -> None:
    """Refuse to go on where there is no checkpoint, or with settings that would make it another run."""
    latest_complete(folder / CHECKPOINTS)
    path = folder / "config.yaml"
    try:
        earlier = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}, which says what run is to be resumed, cannot be read: {error}") from error
    for key in _FIXED:
        if earlier.get(key) != config[key]:
            raise UserError(
                f"{path}: {key} is {earlier.get(key)}, and {config[key]} is asked for: a run is resumed with what it "
                "was begun with, but for its length, its ranks and what it reports"
            )


def _show_results(folder: Path) -> None:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    accuracy = summary["valid_accuracy"]
    found = f"validation accuracy {100 * accuracy:.2f} %, " if accuracy is not None else ""
    where = "one rank" if summary["ranks"] == 1 else f"{summary['ranks']} ranks over {summary['transport']}"
    clock = " on the virtual clock" if summary["transport"] == "virtual" else ""
    waited = summary[
        "exposed_wait_fraction"
    ]  # None where no time has passed, as there may on the virtual clock
    waiting = "" if waited is None else f", {100 * waited:.0f} % of it waiting for other ranks"
    print(
        f"{summary['task']}, {summary['recipe'] or 'own strategy'}, {where}: {found}validation loss "
        f"{summary['valid_loss']:.4f} after {summary['steps']} steps in {summary['seconds']:.2g} s{clock}"
        f"{waiting if summary['ranks'] > 1 else ''}"
    )
    print(
        f"results in {os.path.relpath(folder)}: {', '.join(sorted(path.name for path in folder.iterdir()))}"
    )
    if (folder / TRACE_FILE).exists():
        print(f"trace: open {os.path.relpath(folder / TRACE_FILE)} in https://ui.perfetto.dev")
