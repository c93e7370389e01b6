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
from hocket.comparison.group import MEANING, Group, differing_settings, group_by_seed
from hocket.comparison.measure import measures, parse_target
from hocket.comparison.record import Record, read_record, read_records
from hocket.errors import UserError, some
from hocket.installing import how_to_install
from hocket.training import CHECKPOINTS, REPORT
from hocket.training.provenance import kept_modules

__all__ = ["compare_command", "require_plotly", "write_report"]

_PAGE = "index.html"


def compare_command(
    folders: Sequence[Path], metrics: Sequence[str], target: str | None, out: Path | None
) -> None:
    """Carry out `hocket compare`.

    Raises:
        UserError: a folder that is no run, a metric that a run has not, a page that cannot be written.
    """
    if out is not None:
        require_plotly("--out")
    records, without_metrics = read_records(folders)
    aim = parse_target(target, records) if target is not None else None
    columns = measures(records, metrics, aim)
    groups = group_by_seed(records)
    notes = _notes(records, groups, without_metrics)
    for note in notes:
        print(f"hocket: {note}", file=sys.stderr)
    if aim is not None:
        print(f"target: {aim}")
    show_table(
        ["run", *(column.name for column in columns)],
        [[group.label, *(column.cell(group) for column in columns)] for group in groups],
        numbers=[column.name for column in columns],
        width=shutil.get_terminal_size().columns,
    )
    if any(len(group.records) > 1 for group in groups):
        print(MEANING)
    for line in differing_settings([(group.label, group.records[0].config) for group in groups]):
        print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  "))
    if out is not None:
        from hocket.comparison.page import comparison_page

        _write(out / _PAGE, lambda: comparison_page(groups, columns, aim, notes), "--out")
        print(f"page: {os.path.relpath(out / _PAGE)}")


def write_report(folder: Path, title: str) -> None:
    """Write the page of one run that has ended into its folder."""
    from hocket.comparison.page import run_page

    record = read_record(folder, folder.resolve().name)
    _write(folder / REPORT, lambda: run_page(record, measures([record], (), None), title), "--report")


def require_plotly(option: str) -> None:
    """Refuse what needs a page where pages cannot be made.

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
        UserError: it cannot be written; names the option that asked for it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path.parent}: cannot be written: {error.strerror}") from error


def _notes(records: Sequence[Record], groups: Sequence[Group], without_metrics: Sequence[Path]) -> list[str]:
    """Return what makes a comparison less than it seems.

    Args:
        records: what is compared.
        groups: the same.
        without_metrics: folders of runs that are left out.
    """
    notes = []
    tasks = _by(records, lambda record: json.dumps(record.task, sort_keys=True))
    if len(tasks) > 1:
        told = "; ".join(f"{_task(each[0])}: {_labels(each)}" for each in tasks)
        notes.append(f"the runs are of different tasks, whose metrics do not compare ({told})")
    clocks = _by(records, lambda record: str(record.transport == "virtual"))
    if len(clocks) > 1:
        told = "; ".join(f"{each[0].transport}: {_labels(each)}" for each in clocks)
        notes.append(f"seconds on the virtual clock do not compare with those of others ({told})")
    versions: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        for module, contents in kept_modules(record.folder).items():
            versions.setdefault(module, {}).setdefault(str(sorted(contents)), []).append(record)
    for module, by_contents in sorted(versions.items()):
        if len(by_contents) > 1:
            told = "; ".join(map(_labels, by_contents.values()))
            notes.append(f"the runs are of different code: {module} is another in each of: {told}")
    for group in groups:
        for same in _by(group.records, lambda record: str(record.config["seed"])):
            if len(same) > 1:
                notes.append(
                    f"{group.label} counts seed {same[0].config['seed']} {len(same)} times, and seems to spread less "
                    f"than it does: name one of {_labels(same)}"
                )
    for record in records:
        if record.summary is None:
            notes.append(
                f"{record.folder} has not ended: its numbers are those until step {record.steps}; if it was "
                f"interrupted, {_cure(record.folder)}"
            )
    notes += [
        f"{folder} is left out: it has no metrics yet; if it was interrupted, {_cure(folder)}"
        for folder in without_metrics
    ]
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
