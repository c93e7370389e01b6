"""`hocket compare`: runs side by side, as a table and as a page."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from hocket.checkpoint.folder import complete
from hocket.cli.table import show_table
from hocket.comparison.answer import UNTIMED
from hocket.comparison.group import MEANING, RunGroup, differing_settings, group_by_seed
from hocket.comparison.measure import measures, parse_targets
from hocket.comparison.paired import difference_table
from hocket.comparison.record import Record, read_record, read_records, runs_within
from hocket.disk import write_text
from hocket.errors import UserError, reason, some
from hocket.installing import how_to_install
from hocket.own_files import claim, refuse_foreign
from hocket.results import CHECKPOINTS, REPORT
from hocket.results.provenance import kept_modules

#: The name of the page of a comparison.
PAGE = "index.html"


def compare_command(
    folders: Sequence[Path], metrics: Sequence[str], targets: Sequence[str], out: Path | None
) -> None:
    """Carry out `hocket compare`.

    Raises:
        UserError: a folder is no run, a run lacks a metric, or the page cannot be written.
    """
    if out is not None:
        require_plotly("--out")
        refuse_foreign(out, [PAGE], "--out")
    records, without_metrics = read_records(folders)
    aims = parse_targets(targets, records)
    columns = measures(records, metrics, aims)
    groups = group_by_seed(records)
    notes = [*_left_within(folders, records), *_notes(records, groups, without_metrics)]
    for note in notes:
        print(f"hocket: {note}", file=sys.stderr)
    width = shutil.get_terminal_size().columns
    for line in differing_settings([(group.label, group.settings) for group in groups]):
        print(textwrap.fill(line, width, subsequent_indent="  "))
    for aim in aims:
        print(f"{aim.label}: {aim}")
    names = [column.name for column in columns]
    cells = [[group.marked, *(column.cell(group) for column in columns)] for group in groups]
    show_table(["run", *names], cells, numbers=names, width=width)
    if any(len(group.records) > 1 for group in groups):
        print(MEANING)
    differences = difference_table(groups, columns)
    if differences is not None:
        print()
        print(textwrap.fill(differences.meaning, width, subsequent_indent="  "))
        show_table(differences.head, differences.rows, numbers=differences.head[1:], width=width)
    if out is not None:
        from hocket.comparison.page import comparison_page

        _write(out / PAGE, lambda: comparison_page(groups, columns, aims, notes), "--out")
        print(f"page: {os.path.relpath(out / PAGE)}")


def write_report(folder: Path, title: str) -> None:
    """Write the page of one run that has ended into its folder."""
    from hocket.comparison.page import run_page

    record = read_record(folder, folder.resolve().name)
    _write(folder / REPORT, lambda: run_page(record, measures([record], ()), title), "--report")


def require_plotly(option: str) -> None:
    """Refuse an option that needs plotly if it is not installed.

    Raises:
        UserError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise UserError(
            f"{option} draws with plotly, which is not installed: {how_to_install('hocket-core', 'plot')}"
        )


def _write(path: Path, make: Callable[[], str], option: str) -> None:
    """Write a page.

    Raises:
        UserError: the page cannot be written; names the option that asked for it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        claim(path.parent, path.name)
        write_text(path, make())
    except OSError as error:
        raise UserError(f"{option} {path.parent} cannot be written: {reason(error)}") from error


def _notes(
    records: Sequence[Record], groups: Sequence[RunGroup], without_metrics: Sequence[Path]
) -> list[str]:
    """Return notes on the limits of a comparison.

    Args:
        records: the runs that are compared.
        groups: the same runs in groups.
        without_metrics: folders of runs that are left out.
    """
    notes = []
    tasks = _by(records, lambda record: json.dumps(record.task, sort_keys=True))
    if len(tasks) > 1:
        listed = "; ".join(f"{_task(each[0])}: {_labels(each)}" for each in tasks)
        notes.append(f"the runs have different tasks, so their metrics cannot be compared ({listed})")
    clocks = _by(records, lambda record: str(record.transport == "virtual"))
    if len(clocks) > 1:
        listed = "; ".join(f"{each[0].transport}: {_labels(each)}" for each in clocks)
        notes.append(f"seconds on the virtual clock cannot be compared with others ({listed})")
    versions: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        for module, contents in kept_modules(record.folder).items():
            versions.setdefault(module, {}).setdefault(str(sorted(contents)), []).append(record)
    for module, by_contents in sorted(versions.items()):
        if len(by_contents) > 1:
            listed = "; ".join(map(_labels, by_contents.values()))
            notes.append(f"the runs used different code: {module} differs between: {listed}")
    for group in groups:
        by_seed = _by(group.records, lambda record: str(record.config["seed"]))
        same = [f"{_labels(each)} (seed {each[0].config['seed']})" for each in by_seed if len(each) > 1]
        if same:
            notes.append(
                f"{group.label}: some runs have the same settings and seed: {'; '.join(same)}. This makes "
                "the deviation after ± too small: compare one run for each seed"
            )
    notes += [f"{record.label} (!): {warning}" for record in records for warning in record.warnings]
    if untimed := [record for record in records if not record.is_timed]:
        notes.append(f"{_labels(untimed)}: {UNTIMED}")
    for record in records:
        if record.summary is None:
            notes.append(
                f"{record.folder} has not ended: its numbers go up to step {record.steps}; if it was "
                f"interrupted, {_cure(record.folder)}"
            )
    notes += [
        f"{folder} is left out: it has no metrics yet; if it was interrupted, {_cure(folder)}"
        for folder in without_metrics
    ]
    return notes


def _left_within(folders: Sequence[Path], records: Sequence[Record]) -> list[str]:
    """Return a note for each given folder that is a run and holds other runs, which are not compared."""
    taken = {record.folder.resolve() for record in records}
    notes = []
    for folder in folders:
        left = [each for each in runs_within(folder) if each.resolve() not in taken]
        if folder.resolve() in taken and left:
            notes.append(
                f"{folder} is a run, and is compared. It also holds {len(left)} other runs, which are not "
                f"compared ({some([each.name for each in left])}): to compare them, name them, as in "
                f"{folder}/*/"
            )
    return notes


def _cure(folder: Path) -> str:
    if complete(folder / CHECKPOINTS):
        return f"continue it with `hocket resume {folder}`"
    return "begin it anew"


def _by(records: Sequence[Record], key: Callable[[Record], str]) -> list[list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return list(found.values())


def _labels(records: Sequence[Record]) -> str:
    return some([record.label for record in records])


def _task(record: Record) -> str:
    fields = ", ".join(f"{key}={value}" for key, value in record.task.items() if key != "name")
    return f"{record.task['name']} ({fields})" if fields else str(record.task["name"])
