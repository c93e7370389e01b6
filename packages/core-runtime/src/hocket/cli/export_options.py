"""`hocket export`, as the command line has it; what carries it out imports torch."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.click_parts import Folder, out_option


@click.command()
@click.argument("source", type=Folder(path_type=Path), metavar="RUN|CHECKPOINT|MODEL")
@out_option("Folder that is only for the export; an earlier export in it is replaced.", required=True)
@click.option(
    "--format",
    type=click.Choice(("safetensors", "dcp", "hf", "torch")),
    default="safetensors",
    show_default=True,
    help="hf: the files that the model's save_pretrained writes; torch: training.pt, with the optimizer's "
    "state.",
)
@click.option(
    "--state",
    is_flag=True,
    help="With --format dcp and a checkpoint: also write the strategy's state of all ranks.",
)
@click.option(
    "--replica",
    type=click.IntRange(min=0),
    metavar="RANK",
    help="Export this rank's replica instead of the replicas' mean.",
)
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="Function that returns the model for --format hf; default: the run's task builds it.",
)
@click.option(
    "--max-shard-bytes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Split safetensors into files of at most this size; default: 5 GB, or the model's own.",
)
def export(
    source: Path,
    out: Path,
    format: str,
    state: bool,
    replica: int | None,
    model: str | None,
    max_shard_bytes: int | None,
) -> None:
    """Write a run's model for other programs.

    It reads a run's folder, a checkpoint or another export, and starts no ranks. From a checkpoint it writes the
    replicas' mean, with which `hocket resume` begins on another number of ranks. `dcp` is the format of
    torch.distributed.checkpoint.

    \b
    hocket export runs/mine --out model
    hocket export runs/mine/checkpoints/step-00000100 --out model --format dcp
    hocket export checkpoints --out model --format hf --model mine:build
    hocket export runs/mine --out training --format torch
    hocket export runs/mine --out all --format dcp --state
    """
    from hocket.cli.exporting import export_command

    export_command(source, out, format, state, replica, model, max_shard_bytes)
