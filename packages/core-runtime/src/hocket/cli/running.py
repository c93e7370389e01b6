"""`hocket run`: start the ranks, or be one of them, and say where the results lie."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.cli.comparing import require_plotly
from hocket.cli.folders import check_asked, folder_of, load_resumed, prepared, with_ranks
from hocket.config.settings import Device, TransportName
from hocket.errors import UserError
from hocket.training import NEXT_CONFIG, SUMMARY, TRACE_FILE
from hocket.training.devices import choose_device
from hocket.training.observer import TERMINAL_VARIABLE, text_of_metrics
from hocket.training.run import RunConfig, load_run
from hocket.transport.job_folder import job_folder, shared_job_folder
from hocket.transport.joining import launched_rank, launched_ranks, local_ranks
from hocket.transport.launching import find_mpiexec, launch, threads_per_rank

__all__ = ["resume_command", "run_command"]


def run_command(
    target: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    transport: str | None,
    out: Path | None,
    trace: bool,
    report: bool,
    resume: bool,
) -> int:
    """Carry out `hocket run` and return the exit status.

    Raises:
        UserError: whatever is wrong with what was asked for.
    """
    if not resume:
        return _carry_out(_with_options(load_run(target, overrides), transport, trace, report), ranks, out)
    if out is None:
        raise UserError("--resume continues the run in a folder: name it with --out")
    return resume_command(out, overrides, ranks, transport, trace, report, target)


def resume_command(
    folder: Path,
    overrides: tuple[str, ...],
    ranks: int | None,
    transport: str | None,
    trace: bool,
    report: bool,
    target: str | None = None,
) -> int:
    """Carry out `hocket resume`, or `hocket run TARGET --resume`, and return the exit status.

    Raises:
        UserError: whatever is wrong with what was asked for.
    """
    run = load_resumed(folder, overrides)
    if target is not None and launched_rank() == 0:
        check_asked(target, folder)
    if launched_ranks() is not None:
        run = with_ranks(run, ranks, overrides)  # what the launcher was asked for is newer than the folder
    return _carry_out(_with_options(run, transport, trace, report), ranks, folder, resume=True)


def _with_options(run: RunConfig, transport: str | None, trace: bool, report: bool) -> RunConfig:
    if transport is not None:
        run = replace(run, transport=TransportName(transport))
    if run.transport is TransportName.TORCH:
        raise UserError("transport torch is not available in this version; there are mpi and virtual")
    if report or run.report:
        require_plotly("--report" if report else "report")
    return replace(run, trace=trace or run.trace, report=report or run.report)


def _carry_out(run: RunConfig, ranks: int | None, out: Path | None, *, resume: bool = False) -> int:
    launched = launched_ranks()
    if launched is not None:
        return _join(run, ranks or run.ranks, out, resume, *launched)
    run = replace(run, ranks=ranks or run.ranks or 1)
    assert run.ranks is not None
    run.check_size(run.ranks)
    device = choose_device(run)
    folder = folder_of(out, run)
    _announce(run, folder, run.ranks, device)
    from hocket.cli.checking import check_run

    check_run(run).data(run.seed)
    status = 1
    with prepared(folder, run, resume):
        try:
            status = _start(run, folder, resume)
        finally:
            if status != 0 and run.trace:
                _show_left_trace(folder)
    if status == 0:
        _show_results(folder)
    return status


def _announce(run: RunConfig, folder: Path, local: int, device: Device) -> None:
    """Say what is started, before torch is imported and ranks have joined.

    Args:
        run: with its number of ranks.
        folder: of the results.
        local: how many of the ranks are on this host.
        device: what they train on.
    """
    where, each = f"{run.ranks} ranks over {run.transport.value}", " each"
    if run.ranks == 1:
        where, each = "one rank", ""
    told = 1 if run.transport is TransportName.VIRTUAL else os.environ.get("OMP_NUM_THREADS")
    threads = str(told or threads_per_rank(local))
    print(
        f"starting {run.strategy.name or 'own strategy'}: task {run.task.name}, {where}, on {device.value}, "
        f"{'1 thread' if threads == '1' else f'up to {threads} threads'}{each}, results in {os.path.relpath(folder)}",
        flush=True,
    )


def _start(run: RunConfig, folder: Path, resume: bool) -> int:
    """Carry the run out here, or on ranks of its own, and return the exit status."""
    if run.transport is TransportName.VIRTUAL:
        from hocket.cli.ranking import run_virtual

        run_virtual(run, folder, resume=resume)
    elif run.ranks == 1:
        from hocket.cli.ranking import run_rank

        run_rank(run, folder, resume=resume)
    else:
        return _launch(run, folder, resume)
    return 0


def _show_left_trace(folder: Path) -> None:
    """Make a trace of what the ranks of a failed run have left of it."""
    from hocket.trace import merge_left

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
    folder = folder_of(out, run)  # the others write nothing, and their clocks may give another name
    if launched_rank() == 0:
        _announce(run, folder, local_ranks(), choose_device(run))

    import torch

    from hocket.transport import join

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(local_ranks()))
    first = join().rank == 0
    with prepared(folder, run, resume) if first else contextlib.nullcontext():
        run_rank(run, folder, resume=resume)
    if first:
        _show_results(folder)
    return 0


def _launch(run: RunConfig, folder: Path, resume: bool) -> int:
    environment = {}
    if sys.stdout.isatty():
        environment = {TERMINAL_VARIABLE: "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    program = [sys.executable, "-m", "hocket.cli.ranking", str(folder / NEXT_CONFIG), str(folder)]
    program += ["--resume"] if resume else []
    assert run.ranks is not None
    with job_folder(Path(tempfile.gettempdir())) as pids, shared_job_folder() as variables:
        environment |= variables
        return launch(find_mpiexec(), run.ranks, program, folder=pids, environment=environment)


def _show_results(folder: Path) -> None:
    summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    where = "one rank" if summary["ranks"] == 1 else f"{summary['ranks']} ranks over {summary['transport']}"
    clock = " on the virtual clock" if summary["transport"] == "virtual" else ""
    waited = summary[
        "exposed_wait_fraction"
    ]  # None where no time has passed, as there may on the virtual clock
    waiting = "" if waited is None else f", {100 * waited:.0f} % of it waiting for other ranks"
    print(
        f"{summary['task']}, {summary['recipe'] or 'own strategy'}, {where}: validation "
        f"{text_of_metrics(summary)} after {summary['steps']} steps in {summary['seconds']:.2g} s{clock}"
        f"{waiting if summary['ranks'] > 1 else ''}"
    )
    print(
        f"results in {os.path.relpath(folder)}: {', '.join(sorted(path.name for path in folder.iterdir()))}"
    )
    if (folder / TRACE_FILE).exists():
        print(f"trace: open {os.path.relpath(folder / TRACE_FILE)} in https://ui.perfetto.dev")
