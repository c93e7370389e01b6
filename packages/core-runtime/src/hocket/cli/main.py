"""The commands of `hocket`; a user's mistake ends with one message and exit status 2, without a traceback."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from hocket import __version__
from hocket.cli.click_parts import Folder, out_option
from hocket.cli.completion import complete_overrides, complete_recipes
from hocket.cli.export_options import export
from hocket.cli.mistakes import mistakes_reported
from hocket.cli.network_options import model_asked, network_options
from hocket.cli.new_options import new
from hocket.cli.rank_options import island_option, rank_options, ranks_option
from hocket.cli.recommend_options import recommend_options
from hocket.cli.run_options import RunOptions, run_options
from hocket.cli.streams import keep_streams
from hocket.cli.wanted_ranks import WantedRanks
from hocket.patience import saying_it_goes_on
from hocket.training.startup import defer_dynamo

_TARGET = click.argument("target", metavar="RECIPE|FILE.yaml", shell_complete=complete_recipes)
_OVERRIDES = click.argument(
    "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hocket")
def cli() -> None:
    """Communication strategies for distributed PyTorch training.

    \b
    hocket recommend --params 25M --hosts 4x1 --bandwidth 100mbit --step 500ms
    hocket launch -n 4 train.py
    hocket run diloco -n 4 --report
    """


@cli.command()
@_TARGET
@_OVERRIDES
@rank_options("from the file, else from --hosts, else 1")
@out_option("Folder for the results; default: runs/NAME-TIME.")
@click.option(
    "--from",
    "start_from",
    type=Folder(path_type=Path),
    help="Begin with this model: an export, a safetensors file, or a Hugging Face folder.",
)
@click.option("--resume", is_flag=True, help="Continue the run in the folder --out, as `hocket resume` does.")
@click.option(
    "--overwrite", is_flag=True, help="Replace an earlier run's results and checkpoints in the folder --out."
)
@run_options
def run(
    target: str,
    overrides: tuple[str, ...],
    wanted: WantedRanks,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    start_from: Path | None,
    options: RunOptions,
) -> None:
    """Train a task, configured by a recipe's name or a YAML file.

    Without a launcher this starts its own ranks; under mpiexec, torchrun or srun it joins theirs. `hocket plugins`
    lists the recipes and tasks.

    \b
    hocket run sgd -n 4
    hocket run sgd --hosts a:4,b:4
    hocket run periodic_average parameters.0.every=4 task=fashion_mnist -n 2
    hocket run sgd 'optimizer={name: muon, rest: adamw}' accumulate=4
    hocket run sgd checkpoint.every=100 --out runs/mine; hocket resume runs/mine
    hocket run diloco --from runs/mine -n 4
    hocket run agd -n 4 epochs=2 --print-config > mine.yaml
    hocket run mine.yaml --dry-run
    """
    if start_from is not None:
        overrides = (*overrides, f"start_from={json.dumps(str(start_from))}")
    from hocket.cli.running import run_command

    sys.exit(run_command(target, overrides, wanted, out, options, resume, overwrite))


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@rank_options(
    "from --hosts", "torch between hosts, and mpi on one host if installed", transports=("mpi", "torch")
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for `python -m`.")
@out_option(
    "Folder for the results of the script's first session, as `hocket run` writes them; default: none."
)
@click.option("--trace", is_flag=True, help="Write trace.json.gz, for ui.perfetto.dev, to the results.")
@click.option("--report", is_flag=True, help="Write report.html, a page with figures, to the results.")
@click.argument("script", metavar="SCRIPT.py|PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
def launch(
    wanted: WantedRanks,
    module: bool,
    out: Path | None,
    trace: bool,
    report: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start your own script on several ranks.

    The ranks share the cores, as with `hocket run`. If one fails, all ranks end, and the last line says why.

    \b
    hocket launch -n 4 train.py --lr 0.1
    hocket launch --hosts a:4,b:4 train.py
    hocket launch -n 4 --out runs/a --report train.py
    """
    from hocket.cli.launching import launch_command

    sys.exit(launch_command(wanted, script, arguments, module=module, out=out, trace=trace, report=report))


@cli.command()
@click.argument("folder", type=Folder(path_type=Path, file_okay=False))
@_OVERRIDES
@rank_options("as many as before", "as before")
@run_options
def resume(
    folder: Path,
    overrides: tuple[str, ...],
    wanted: WantedRanks,
    options: RunOptions,
) -> None:
    """Continue the run in FOLDER from its newest checkpoint.

    Settings come from its config.yaml. KEY=VALUE may change its length, its ranks and what it reports.

    \b
    hocket resume runs/mine
    hocket resume runs/mine epochs=40 -n 8
    """
    from hocket.cli.running import resume_command

    sys.exit(resume_command(folder, overrides, wanted, options))


@cli.command()
@click.argument(
    "words",
    nargs=-1,
    required=True,
    metavar="RECIPE|FILE.yaml... [KEY=VALUE]...",
    shell_complete=complete_recipes,
)
@ranks_option("from --hosts, else from the file, else 4")
@click.option("--hosts", metavar="a:8,b:8|4x8|FILE", help="Hosts on which the ranks run; default: one host.")
@island_option
@network_options
@click.option("--analysis", is_flag=True, help="Show, and draw, how fast topologies average the replicas.")
@click.option(
    "--compare",
    multiple=True,
    default=("exponential",),
    show_default=True,
    metavar="TOPOLOGY",
    help="Another topology to analyse; may be repeated.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("mixing.png"),
    show_default=True,
    help="File for the picture of the analysis.",
)
def plan(
    words: tuple[str, ...],
    ranks: int | None,
    hosts: str | None,
    island: list[str],
    params: str | None,
    model: str | None,
    bandwidth: list[str],
    latency: list[str],
    analysis: bool,
    compare: tuple[str, ...],
    picture: Path,
) -> None:
    """Show a strategy's exchanges and what they cost.

    The cost is bytes per rank, memory and predicted time. With several strategies each gets a row.

    \b
    hocket plan agd -n 8
    hocket plan sgd hierarchical_sgd dpsgd --hosts 4x8 task.network=cnn
    hocket plan sgd diloco -n 8 --params 25M compute.step_s=200ms
    hocket plan diloco 'diloco parameters.0.every=20' -n 8
    hocket plan diloco dpsgd --hosts 4x8 --island 8 --params 7B
    hocket plan dpsgd -n 16 --analysis --compare random_matching
    """
    from hocket.cli.planning import plan_command
    from hocket.cli.planning_several import plan_several
    from hocket.launch.hosts import parse_hosts

    # A file's name may have an = in it, and so have the overrides behind a recipe: `diloco parameters.0.every=20`.
    targets = [word for word in words if os.path.isfile(word) or not re.match(r"[^\s=]*\s*=", word)]
    overrides = tuple(word for word in words if word not in targets)
    overrides += (*bandwidth, *latency, *island)
    places = parse_hosts(hosts) if hosts else ()
    given = model_asked(params, model)
    if not targets:
        raise click.UsageError("Missing argument 'RECIPE|FILE.yaml'.")
    if len(targets) > 1:
        if analysis:
            raise click.UsageError("--analysis takes one strategy: name one recipe or file.")
        with saying_it_goes_on("planning"):
            plan_several(targets, overrides, ranks, places, given)
        return
    with saying_it_goes_on("planning"):
        run, placement = plan_command(targets[0], overrides, ranks, places, given)
    if analysis:
        from hocket.cli.analysis import analysis_command

        analysis_command(run.strategy, placement, compare, picture)


@cli.command()
@recommend_options
def recommend(**options: Any) -> None:
    """Name the strategies to try first.

    The answer is for a model, its hosts and their network. A strategy of your own (a file, a run, or a recipe with
    other settings) becomes one of the rows.

    \b
    hocket recommend --params 25M --hosts 8x1 --bandwidth 1gbit --step 100ms
    hocket recommend task=fashion_mnist --hosts 4x1 --bandwidth 100mbit --step 20ms
    hocket recommend runs/mine --hosts 8x1 --bandwidth 1gbit
    hocket recommend --params 25M --hosts 8x1 --step 100ms --late 1x300ms@10%
    hocket recommend mine.yaml --params 25M --hosts 8x1 --step 100ms
    """
    from hocket.cli.recommending import recommend_command

    with saying_it_goes_on("comparing strategies"):
        recommend_command(**options)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=Folder(path_type=Path), metavar="RUN...")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A metric to show; may be repeated.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Show seconds and bytes until a metric first reaches a value; may be repeated.",
)
@out_option("Folder for index.html, a page with figures.")
def compare(
    runs: tuple[Path, ...], metrics: tuple[str, ...], targets: tuple[str, ...], out: Path | None
) -> None:
    """Compare runs by metrics, time, bytes and waiting.

    Runs that differ only by their seeds share a row. A row's numbers are mean ± standard deviation (n - 1) over its
    seeds. A second table shows the differences from the first row, seed by seed, with 95 % confidence intervals. RUN is
    a run's folder, or a folder of runs. `distance` is that of the replicas from their mean, `-` if not logged.

    \b
    hocket compare runs/sgd runs/agd --target accuracy=0.95
    hocket compare runs --metric valid_loss --metric overlap_share --out figures
    """
    from hocket.cli.comparing import compare_command

    compare_command(runs, metrics, targets, out)


@cli.command()
@_TARGET
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE,VALUE...]...")
@rank_options("from the file, else 1")
@out_option("Folder for the results; default: sweeps/NAME.")
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Number of runs at a time."
)
@click.option(
    "--script",
    is_flag=True,
    help="Run a script instead of a recipe. Keys of the strategy change its hocket.attach; other keys "
    "become arguments --KEY VALUE.",
)
@click.option("--dry-run", is_flag=True, help="Check everything and list the runs; start nothing.")
def sweep(
    target: str,
    overrides: tuple[str, ...],
    wanted: WantedRanks,
    out: Path | None,
    jobs: int,
    script: bool,
    dry_run: bool,
) -> None:
    """Run all combinations of values, and compare the runs.

    Commas separate values. `strategy` takes recipes' names and files, each followed by overrides of its own. The same
    command again carries out the runs that have not ended, from their newest checkpoints if they have any.

    \b
    hocket sweep sgd strategy=sgd,agd,dpsgd seed=0,1,2 -n 4
    hocket sweep sgd 'strategy=sgd,mine.yaml,dpsgd parameters.0.every=4' seed=0,1
    hocket sweep mine.yaml optimizer.lr=0.1,0.2 batch_size=32,64 --jobs 2
    hocket sweep --script train.py strategy=agd,diloco seed=0,1 -n 4
    """
    if script:
        from hocket.cli.sweeping_scripts import sweep_script_command

        sys.exit(sweep_script_command(target, overrides, wanted, out, jobs, dry_run))
    from hocket.cli.sweeping import sweep_command

    sys.exit(sweep_command(target, overrides, wanted, out, jobs, dry_run))


@cli.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, options_metavar=""
)
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Run a plugin's microbenchmark, such as partial allreduce against MPI's.

    Without a name, list the benchmarks.

    \b
    hocket bench
    hocket bench partial_allreduce --help
    """
    from hocket.cli.benchmarking import bench_command

    bench_command(name, arguments)


cli.add_command(export)
cli.add_command(new)


@cli.command()
def plugins() -> None:
    """List installed plugins and the names to use in configs."""
    from hocket.cli.listing import plugins_command

    plugins_command()


@cli.command()
@out_option("Check that ranks can write to this folder, and that all ranks of a launcher see it.")
def doctor(out: Path | None) -> None:
    """Check this machine's setup and report problems.

    The exit status is 1 if there are any. With `--out` under a launcher rank 0 reports, and a line names each host that
    does not see the folder:

    \b
    mpiexec -n 4 hocket doctor --out runs
    torchrun --nproc-per-node 4 --no-python hocket doctor --out runs
    """
    from hocket.cli.doctor import doctor_command

    sys.exit(doctor_command(out))


def main() -> None:
    """Run the command line; a user's mistake ends with one message and exit status 2."""
    keep_streams()
    defer_dynamo()
    with mistakes_reported():
        cli.main(standalone_mode=False)
