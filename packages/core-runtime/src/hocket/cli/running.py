"""`hocket run`: start the ranks, or be one of them, and print the path of the results."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from hocket.checkpoint.folder import complete
from hocket.cli.combinations import has_several_values
from hocket.cli.comparing import require_plotly
from hocket.cli.folders import check_asked, check_free, load_resumed, named_folder, prepared, with_ranks
from hocket.cli.own_disks import are_several, resumed_run, was_restarted
from hocket.cli.printing import say_left_trace, say_results
from hocket.cli.run_options import RunOptions
from hocket.cli.wanted_ranks import WantedRanks, launch_here
from hocket.config.settings import Device, TransportName
from hocket.errors import ConfigError, UserError
from hocket.launch.hosts import are_here
from hocket.launch.island_jobs import refuse_without_ranks
from hocket.launch.joining import chosen_transport, launched, launched_rank
from hocket.launch.launching import Starter
from hocket.launch.rank_process import check_memory, own_python, threads_per_rank
from hocket.plain import TreeView
from hocket.quantities import format_seconds
from hocket.results import CHECKPOINTS, NEXT_CONFIG, SUMMARY, TRACE_FILE
from hocket.results.history import read_summary
from hocket.results.provenance import describe_start
from hocket.training.devices import choose_device
from hocket.training.observer import Display, text_of_metrics
from hocket.training.run import RunConfig, load_run, resolved
from hocket.transport.launchers import Launched

if TYPE_CHECKING:
    from hocket.task import TaskData

_log = logging.getLogger(__name__)


def run_command(
    target: str,
    overrides: tuple[str, ...],
    wanted: WantedRanks,
    out: Path | None,
    options: RunOptions,
    resume: bool,
    overwrite: bool,
) -> int:
    """Carry out `hocket run` and return the exit status.

    Raises:
        UserError: a wrong argument, option or setting.
    """
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it: give one of them")
    if not (resume or (out is not None and not options.only_shows and was_restarted(out))):
        command = ["run", target, *overrides, *(["--out", str(out)] if out else [])]
        command += ["--overwrite"] if overwrite else []
        with _naming_sweeps(target, overrides):
            run = _with_options(load_run(target, overrides), wanted, options)
            begins = not options.print_config and launched_rank() == 0
            if out is not None and begins:
                check_free(out, run, overwrite)
            return _carry_out(run, wanted, out, command, options, overwrite=overwrite)
    if out is None:
        raise UserError("--resume continues the run in a folder: name it with --out")
    return resume_command(out, overrides, wanted, options, target)


def resume_command(
    folder: Path,
    overrides: tuple[str, ...],
    wanted: WantedRanks,
    options: RunOptions,
    target: str | None = None,
) -> int:
    """Carry out `hocket resume`, or `hocket run TARGET --resume`, and return the exit status.

    Raises:
        UserError: a wrong argument, option or setting.
    """
    start = None
    if are_several() and not options.only_shows:
        start = describe_start() if launched_rank() == 0 else {}
        run = resumed_run(folder, overrides, wanted.transport)
    else:
        run = load_resumed(folder, overrides)
    if target is not None and launched_rank() == 0:
        check_asked(target, folder)
    if launched() is not None:
        # The launcher's number of ranks is newer than the folder's.
        run = with_ranks(run, wanted.ranks, overrides)
    command = ["resume", str(folder), *overrides]
    run = _with_options(run, wanted, options)
    return _carry_out(run, wanted, folder, command, options, resume=True, start=start)


@contextlib.contextmanager
def _naming_sweeps(target: str, overrides: Sequence[str]) -> Iterator[None]:
    """Add, to an error about an override's several values, the `hocket sweep` that takes them.

    Raises:
        ConfigError: in place of the one that was raised.
    """
    try:
        yield
    except ConfigError as error:
        several = [text.partition("=")[2] for text in overrides if has_several_values(text)]
        if not any(values in str(error) for values in several):
            raise
        sweep = shlex.join(["hocket", "sweep", target, *overrides])
        raise type(error)(f"{error}. To run each of several values: `{sweep}`") from error


def _with_options(run: RunConfig, wanted: WantedRanks, options: RunOptions) -> RunConfig:
    if wanted.transport is not None:
        run = replace(run, transport=TransportName(wanted.transport))
    if run.transport is TransportName.VIRTUAL and wanted.hosts:
        raise UserError(
            "virtual ranks are threads of one process: leave out --hosts, or name another --transport"
        )
    if run.transport is TransportName.VIRTUAL and run.island.ranks > 1:
        raise UserError(
            "island: virtual ranks are threads of one process, and torch.distributed needs a process for each rank: "
            "choose --transport torch or mpi, or leave island out"
        )
    if options.report or run.report:
        require_plotly("--report" if options.report else "report")
    return replace(options.traced(run), report=options.report or run.report)


def _carry_out(
    run: RunConfig,
    wanted: WantedRanks,
    out: Path | None,
    command: Sequence[str],
    options: RunOptions,
    *,
    resume: bool = False,
    overwrite: bool = False,
    start: TreeView | None = None,
) -> int:
    """Be a rank, or start the ranks.

    Args:
        run: the run, with the options of the command line.
        wanted: the ranks that were asked for.
        out: the folder for results, if one is named.
        command: the words behind `hocket`, without its options.
        options: the options on display, trace and checks.
        resume: whether the run in the folder goes on.
        overwrite: whether an earlier run's results are replaced.
        start: the mapping of `describe_start` of a rank that has joined the others; else it is made.
    """
    found = launched()
    if options.print_config:
        if launched_rank() == 0:
            ranks = wanted.size or run.ranks
            print(yaml.safe_dump(resolved(replace(run, ranks=ranks)), sort_keys=False), end="")
        return 0
    if found is not None:
        return _join(run, wanted.ranks or run.ranks, out, resume, overwrite, found, options, start)
    refuse_without_ranks(os.environ)
    wanted = replace(wanted, ranks=wanted.ranks or run.ranks, transport=run.transport)
    run = replace(run, ranks=wanted.size or 1)
    assert run.ranks is not None
    run.check_size(run.ranks)
    starter = None
    if (run.ranks > 1 or wanted.hosts) and run.transport is not TransportName.VIRTUAL:
        starter = wanted.starter([sys.executable, "-m", "hocket", *command, *options.words])
        if not options.dry_run:
            check_memory(sum(h.ranks for h in starter.hosts if are_here([h])) if starter.hosts else run.ranks)
    device = choose_device(run)
    local = max(host.ranks for host in starter.hosts) if starter and starter.hosts else run.ranks
    transport = starter.transport if starter else TransportName.VIRTUAL
    with named_folder(out, run, make=not options.dry_run) as folder:
        announce = partial(_announce, run, folder, transport, local, device, options)
        if options.dry_run:
            data = _checked_data(run, resume)
            announce()
            _show_length(run, data)
            return 0
        announce()
        status = 1
        with contextlib.ExitStack() as kept:

            def ready() -> None:
                _checked_data(run, resume)
                kept.enter_context(prepared(folder, run, describe_start(), resume, overwrite))
                kept.callback(lambda: say_left_trace(folder) if status and run.trace else None)

            status = _start(run, folder, resume, overwrite, starter, options, ready)
            if status == 0:
                _refuse_incomplete(folder)
        if status == 0:
            _show_results(folder, options)
        return status


def _announce(
    run: RunConfig, folder: Path, transport: str, local: int, device: Device, options: RunOptions
) -> None:
    """Print a line on the run that starts, before torch is imported and ranks have joined.

    Args:
        run: the run, with its number of ranks.
        folder: the folder of the results.
        transport: the transport between the ranks.
        local: the largest number of ranks that share a host.
        device: the device that they train on.
        options: the options `quiet`, `verbose` and `dry_run`.
    """
    if options.quiet and not options.dry_run:
        return
    assert run.ranks is not None
    where, each = f"{run.island.count(run.ranks)} over {transport}", " each"
    if run.ranks == 1:
        where, each = "one rank", ""
    wanted = 1 if run.transport is TransportName.VIRTUAL else os.environ.get("OMP_NUM_THREADS")
    threads = str(wanted or threads_per_rank(local))
    print(
        f"{'would start' if options.dry_run else 'starting'} {run.strategy.name or 'own strategy'}: "
        f"task {run.task.name}, {where}, on {device.value}, "
        f"{'1 thread' if threads == '1' else f'up to {threads} threads'}{each}, results in {os.path.relpath(folder)}",
        flush=True,
    )
    if options.verbose:
        print(yaml.safe_dump(resolved(run), sort_keys=False), flush=True)


def _show_length(run: RunConfig, data: TaskData) -> None:
    """Print the length of a run that is not started."""
    from hocket.strategy.advice import unreached
    from hocket.training.loop import steps_per_epoch

    assert run.ranks is not None
    samples = len(cast(Sized, data.train))
    shares = run.shares(run.ranks)
    per_epoch = steps_per_epoch(run, samples, shares)
    steps = min(run.steps or per_epoch * run.epochs, per_epoch * run.epochs)
    for text in unreached(run.strategy, steps, run.replicas(run.ranks)):
        _log.warning(text)
    print(
        f"{samples:,} samples to train on: {steps:,} steps of {run.batch_size * run.accumulate * shares:,} samples, "
        f"{per_epoch:,} in an epoch; everything was checked, and nothing was started"
    )


def _checked_data(run: RunConfig, resume: bool) -> TaskData:
    """Check a run before it starts, and return its task's data."""
    from hocket.cli.checking import checked_data

    return checked_data(run, resume)


def _start(
    run: RunConfig,
    folder: Path,
    resume: bool,
    overwrite: bool,
    starter: Starter | None,
    options: RunOptions,
    ready: Callable[[], None],
) -> int:
    """Carry out the run in this process, or on ranks of its own, and return the exit status.

    `ready` is called before a rank begins.
    """
    if starter is not None:
        environment = {}
        if options.display is Display.BAR:
            environment = {"COLUMNS": str(shutil.get_terminal_size().columns)}
        program = [*own_python(), "-m", "hocket.cli.ranking", str(folder / NEXT_CONFIG), str(folder)]
        program += [f"--display={options.display}", *["--resume"] * resume, *["--overwrite"] * overwrite]
        assert run.ranks is not None
        return launch_here(starter, run.ranks, program, lambda: _again(folder), environment, ready)
    ready()
    if run.transport is TransportName.VIRTUAL:
        from hocket.cli.ranking import run_virtual

        run_virtual(run, folder, resume=resume, display=options.display)
    else:
        from hocket.cli.ranking import run_rank

        run_rank(run, folder, resume=resume, display=options.display)
    return 0


def _join(
    run: RunConfig,
    asked: int | None,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    found: Launched,
    options: RunOptions,
    start: TreeView | None,
) -> int:
    """Run as one of the ranks that a launcher has started."""
    from hocket.cli.ranking import run_rank

    if asked is not None and asked != found.size:
        raise UserError(
            f"{found.launcher} started {found.size} ranks, but you asked for {asked}: leave out -n and `ranks`"
        )
    transport = chosen_transport(found, run.transport)
    run = replace(run, ranks=found.size)
    run.check_size(found.size)
    with contextlib.ExitStack() as stack:
        folder = out or Path()
        if found.rank == 0:
            folder = stack.enter_context(named_folder(out, run, make=not options.dry_run))
            announce = partial(
                _announce, run, folder, transport, found.local_size, choose_device(run), options
            )
        if options.dry_run:
            data = _checked_data(run, resume)
            if found.rank == 0:
                announce()
                _show_length(run, data)
            return 0
        if found.rank == 0:
            announce()

        import torch

        from hocket.launch.joining import join
        from hocket.transport.peer import gather

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_per_rank(found.local_size))
        if start is None:  # before MPI, beside which nothing should fork
            start = describe_start() if found.rank == 0 else {}
        peer = join(transport)
        # The folder's name has the time in it, and the ranks' clocks differ.
        folder = Path(gather(peer, str(folder), what="naming the folder")[0])
        if peer.rank == 0:
            stack.enter_context(prepared(folder, run, start, resume, overwrite))
        run_rank(run, folder, resume=resume, overwrite=overwrite, display=options.display)
    if found.rank == 0:
        _show_results(folder, options)
    return 0


def _again(folder: Path) -> str:
    """Return the advice for a run that was cut off."""
    saved = complete(folder / CHECKPOINTS)
    if saved:
        return f"`hocket resume {os.path.relpath(folder)}` continues from {saved[-1].name}"
    return (
        "this run has no checkpoint: run the same command again, from the beginning. With checkpoint.every=N added, "
        f"`hocket resume {os.path.relpath(folder)}` can continue it next time"
    )


def _refuse_incomplete(folder: Path) -> None:
    """Refuse the end of a run whose ranks have all left with status 0, past Python, before its end.

    Raises:
        UserError: the run has not begun, or has no summary.
    """
    if (folder / NEXT_CONFIG).exists() or not (folder / SUMMARY).exists():
        again = (
            f"; then {_again(folder)}"
            if complete(folder / CHECKPOINTS)
            else ", and run the same command again"
        )
        raise UserError(
            f"all ranks exited with status 0 before the run in {os.path.relpath(folder)} was complete, so some code "
            f"called os._exit(0), in your task or a library. Remove that call{again}"
        )


def _show_results(folder: Path, options: RunOptions) -> None:
    if options.quiet:
        return
    summary = read_summary(folder / SUMMARY)
    islands = f" in {summary['islands']} islands" if "islands" in summary else ""
    where = (
        f"{summary['ranks']} ranks{islands} over {summary['transport']}"
        if summary["ranks"] > 1
        else "one rank"
    )
    clock = " on the virtual clock" if summary["transport"] == "virtual" else ""
    # None if no time has passed, as is possible on the virtual clock.
    waited = summary["exposed_wait_fraction"]
    waiting = "" if waited is None else f", {100 * waited:.0f} % of it waiting for other ranks"
    print(
        f"{summary['task']}, {summary['recipe'] or 'own strategy'}, {where}: validation "
        f"{text_of_metrics(summary)} after {summary['steps']} steps in {format_seconds(summary['seconds'])}{clock}"
        f"{waiting if summary['ranks'] > 1 else ''}"
    )
    say_results(folder)
    if (folder / TRACE_FILE).exists():
        print(f"trace: open {os.path.relpath(folder / TRACE_FILE)} in https://ui.perfetto.dev")
