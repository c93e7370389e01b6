"""Pages of one run or several: one file each, with plotly's own JavaScript in it, so that it opens anywhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go
import yaml
from plotly.io import to_html
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from hocket.comparison.answer import answer, bars
from hocket.comparison.group import MEANING, Curve, RunGroup, differing_settings, written
from hocket.comparison.measure import Measure, Target
from hocket.comparison.paired import difference_table
from hocket.comparison.record import Record
from hocket.config.settings import DESCRIPTIVE
from hocket.config.source import DEFAULT_RECIPE
from hocket.errors import HocketError
from hocket.plain import Tree, flattened
from hocket.results import VALID
from hocket.results.history import is_number
from hocket.results.kept_config import differing_keys
from hocket.training.run import load_run, resolved

_OVER = {"step": "step", "seconds": "seconds", "bytes_sent": "MB sent per rank"}
_COST = {
    "wait_share": "time waited for others, %",
    "bytes_sent": "MB sent per rank",
    "consensus_distance": "consensus distance",
}
_WAIT_SHARE = "exposed_wait_fraction"
_SCALES = {"wait_share": 100.0, _WAIT_SHARE: 100.0, "bytes_sent": 1e-6}
_RANKS = "_ranks"
_HEIGHT = 380
_COLUMNS = 3
_SPACING = 0.07
#: Colours that the colour-blind tell apart, too (Okabe and Ito, Color Universal Design), without yellow, which is pale
#: on white. As many dashes as have no divisor in common with them: 35 lines differ, neighbours in both.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdashdot")
_RANK_MARKER = {"size": 8, "color": _COLOURS[0]}
# With so many points or more, lines go without markers.
_FEW = 60
#: A table of settings with more rows is folded.
_MOST_ROWS = 8
_TARGET_LINE = {"color": "#666", "width": 1, "dash": "dot"}
_HTML: Tree = {
    "include_plotlyjs": False,
    "full_html": False,
    "config": {"displaylogo": False, "displayModeBar": False, "responsive": True},
}
# The characters after which a long name may break.
_BREAK_AFTER = re.compile(r"([.,_/=])")

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2em auto; max-width: 1280px; padding: 0 1em; color: #222;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1em 0; font-size: 0.85em; }
th, td { padding: 0.4em 0.4em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top;
  overflow-wrap: normal; }
th { vertical-align: bottom; }
td { white-space: nowrap; }
td small { display: block; color: #666; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; max-width: 16em;
  min-width: 8em; white-space: normal; overflow-wrap: break-word; }
.figure { min-width: 700px; }
.wide { overflow-x: auto; scrollbar-width: thin; }
.bars { margin: 1.2em 0; max-width: 900px; }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 0 0.6em; margin: 0.25em 0; }
.bar b { flex: 0 1 14em; font-weight: normal; overflow-wrap: anywhere; }
.bar span { flex: 1 1 16em; display: flex; align-items: center; }
.bar em { font-style: normal; min-width: 5em; }
.bar i { height: 1.1em; }
i.computing { background: #0072B2; }
i.waiting { background: #D55E00; }
.legend i { display: inline-block; width: 1em; height: 0.8em; }
.note { background: #fff3cd; padding: 0.6em 1em; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
@media (max-width: 800px) { th, td { padding: 0.4em 0.3em; } table { font-size: 0.8em; } }
"""


@dataclass(frozen=True)
class _PlottedCurve:
    """A curve with its name, and its place among others."""

    label: str
    place: int
    curve: Curve

    @property
    def style(self) -> dict[str, str]:
        """Colour and dashes: lines that lie on each other are both seen."""
        return {"color": _COLOURS[self.place % len(_COLOURS)], "dash": _DASHES[self.place % len(_DASHES)]}


#: Returns the lines of a metric (`Record.series`) over a key of rows.
_Lines = Callable[[str, str], list[_PlottedCurve]]


def comparison_page(
    groups: Sequence[RunGroup], columns: Sequence[Measure], targets: Sequence[Target], notes: Sequence[str]
) -> str:
    """Return a page that compares runs.

    Args:
        groups: the runs, grouped by `group_by_seed`.
        columns: the table's columns.
        targets: the values up to which times and bytes are counted.
        notes: remarks that the reader has to see.
    """
    records = [record for group in groups for record in group.records]
    sentences = [
        f"{target.label.capitalize()}: {target}; time and bytes are those of the first line of metrics that reaches it."
        for target in targets
    ]
    if len(records) > len(groups):
        sentences.append(
            f"The table has the {MEANING}. Lines in figures are these means; bands reach one deviation to both sides."
        )

    def lines(name: str, over: str) -> list[_PlottedCurve]:
        return [_PlottedCurve(g.label, place, g.curve(name, over)) for place, g in enumerate(groups)]

    figures = _figures(records, lines, "step", targets)
    banner = [*notes, *differing_settings([(group.label, group.settings) for group in groups])]
    table = _table(groups, columns) + _difference_table(groups, columns)
    top = _answered(groups)
    return _page("Comparison of runs", sentences, top, table, figures, _settings(groups), banner)


def run_page(record: Record, columns: Sequence[Measure], title: str) -> str:
    """Return the page of one run: its cost, its metrics, and their spread over its ranks."""
    group = RunGroup(record.label, [record])

    def lines(name: str, over: str) -> list[_PlottedCurve]:
        of_ranks = group.ranks_curve(name, over)
        return [_PlottedCurve(record.label, 0, of_ranks if of_ranks.x else group.curve(name, over))]

    figures = [*_figures([record], lines, "seconds"), *_by_rank(record)]
    sentences = [f"Task {record.task['name']}, {record.ranks_in_words} over {record.transport}."]
    if record.ranks > 1:
        sentences.append("Bands reach from the smallest rank's value to the largest rank's.")
    top, table = _answered([group]), _table([group], columns)
    return _page(title, sentences, top, table, figures, _configuration(record), record.warnings)


def _answered(groups: Sequence[RunGroup]) -> str:
    text = " ".join(answer(groups))
    return (f'<p class="answer">{escape(text)}</p>' if text else "") + bars(groups)


def _configuration(record: Record) -> str:
    """Return a run's settings as HTML: those in which it differs from its recipe, and all, folded."""
    config = escape(yaml.safe_dump(record.config, sort_keys=False))
    folded = f"<details><summary>config.yaml</summary><pre>{config}</pre></details>"
    recipe, usual = _recipe_of(record)
    if not usual:
        return f"<h2>Settings</h2>{folded}"
    keys = [key for key in record.config if key not in DESCRIPTIVE]
    rows = [
        [key, *(escape(written(value)) for value in values)]
        for key, *values in differing_keys(usual, record.config, keys)
    ]
    table = (
        _folded(["setting", f"recipe {recipe}", "this run"], rows)
        if rows
        else f"<p>They are those of recipe {recipe}.</p>"
    )
    return f"<h2>Settings</h2>{table}{folded}"


def _recipe_of(record: Record) -> tuple[str, Tree]:
    """Return the recipe that a run has the name of, else the default one, with its complete configuration."""
    if "compute" not in record.config:  # a script's
        return "", {}
    for recipe in (record.config.get("name"), DEFAULT_RECIPE):
        with contextlib.suppress(HocketError):
            return str(recipe), resolved(load_run(str(recipe)))
    return "", {}


def _figures(
    records: Sequence[Record], lines: _Lines, cost_over: str, targets: Sequence[Target] = ()
) -> list[go.Figure]:
    """Return figures of the cost of communication, and of each metric over steps, seconds and bytes."""
    named = dict.fromkeys(["train_loss", "loss", *(name for record in records for name in record.metrics)])
    names = [name for name in named if any(record.series(name) for record in records)]
    costs = [name for name in _COST if any(value for r in records for _, value in r.series(name))]
    panels = [(_COST[name], name, cost_over) for name in costs]
    return [
        *([_figure("What communication cost", panels, lines)] if panels else []),
        *(
            _figure(
                name,
                [(name, name, over) for over in _OVER],
                lines,
                [target for target in targets if target.name == name],
            )
            for name in names
        ),
    ]


def _figure(
    title: str, panels: Sequence[tuple[str, str, str]], lines: _Lines, targets: Sequence[Target] = ()
) -> go.Figure:
    """Return a row of panels.

    Args:
        title: the row's title.
        panels: each panel's y axis, its metric, and the key of rows for its x axis.
        lines: returns a panel's lines.
        targets: the targets, whose values are marked.
    """
    figure = make_subplots(cols=len(panels), horizontal_spacing=_SPACING)
    for column, (label, name, over) in enumerate(panels, start=1):
        for line in lines(name, over):
            for trace in _traces(line, name, over, column == 1):
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text=_OVER[over], rangemode="tozero", row=1, col=column)
        figure.update_yaxes(title_text=label, row=1, col=column)
        if name in _COST:
            figure.update_yaxes(rangemode="tozero", row=1, col=column)
    for target in targets:
        figure.add_hline(
            target.value,
            line=_TARGET_LINE,
            annotation_text=target.label,
            annotation_position="top left",
        )
    figure.update_layout(title=title, height=_HEIGHT, template="plotly_white", margin={"t": 60, "b": 60})
    figure.update_layout(legend={"orientation": "h", "y": -0.25})
    return figure


def _traces(line: _PlottedCurve, name: str, over: str, named: bool) -> Iterator[go.Scatter]:
    curve, label = line.curve, escape(line.label)
    x = [value * _SCALES.get(over, 1.0) for value in curve.x]
    mean, low, high = (
        [value * _SCALES.get(name, 1.0) for value in values] for values in (curve.mean, curve.low, curve.high)
    )
    if low != high:
        yield go.Scatter(
            x=[*x, *reversed(x)],
            y=[*high, *reversed(low)],
            fill="toself",
            mode="lines",
            fillcolor=line.style["color"],
            opacity=0.2,
            line={"width": 0},
            hoverinfo="skip",
            legendgroup=label,
            showlegend=False,
        )
    yield go.Scatter(
        x=x,
        y=mean,
        name=label,
        mode="lines+markers" if len(x) < _FEW else "lines",
        line=line.style,
        marker={"size": 5},
        legendgroup=label,
        showlegend=named,
    )


def _by_rank(record: Record) -> Iterator[go.Figure]:
    """Yield figures of each replica's final metrics, and of each rank's waiting."""
    summary = record.summary or {}
    found = {
        name.removesuffix(_RANKS): values
        for name, values in summary.items()
        if name.endswith(_RANKS) and len(values) > 1 and all(map(is_number, values))
    }
    names = list(found)
    for start in range(0, len(names), _COLUMNS):
        title = "" if start else "The ranks at the end"
        chosen = {name: found[name] for name in names[start : start + _COLUMNS]}
        yield _rank_figure(chosen, title, "island" if "islands" in summary else "rank")


def _rank_figure(values_by_name: Mapping[str, Sequence[float]], title: str, replica: str) -> go.Figure:
    figure = make_subplots(cols=_COLUMNS, horizontal_spacing=_SPACING)
    for column, (name, values) in enumerate(values_by_name.items(), start=1):
        scaled = [value * _SCALES.get(name, 1.0) for value in values]
        dots = go.Scatter(
            x=list(range(len(values))), y=scaled, mode="markers", marker=_RANK_MARKER, showlegend=False
        )
        figure.add_trace(dots, row=1, col=column)
        label = _COST["wait_share"] if name == _WAIT_SHARE else name
        whose = replica if name.startswith(VALID) else "rank"
        figure.update_xaxes(title_text=whose, row=1, col=column)
        figure.update_yaxes(title_text=label, row=1, col=column)
    figure.update_layout(title=title, height=_HEIGHT, template="plotly_white")
    return figure


def _table(groups: Sequence[RunGroup], columns: Sequence[Measure]) -> str:
    """Return a row for each group; deviations stand below their means, so that more columns find room."""
    head = ["run", *(column.name for column in columns)]
    rows = [[group.marked, *(column.cell(group) for column in columns)] for group in groups]
    return _wide(head, [[label, *map(_cell, cells)] for label, *cells in rows])


def _difference_table(groups: Sequence[RunGroup], columns: Sequence[Measure]) -> str:
    """Return the table of differences as HTML; empty if no two groups share two seeds."""
    found = difference_table(groups, columns)
    if found is None:
        return ""
    table = _wide(found.head, [[label, *map(_cell, cells)] for label, *cells in found.rows])
    return f"<p>The second table has {escape(found.meaning)}.</p>{table}"


def _cell(text: str) -> str:
    mean, _, rest = text.partition(" ± ")
    if not rest:
        return escape(text)
    deviation, _, unit = rest.partition(" ")
    return f"{escape(f'{mean} {unit}'.rstrip())}<small>± {escape(deviation)}</small>"


def _settings(groups: Sequence[RunGroup]) -> str:
    """Return the groups' settings as HTML: a row for each differing key, and a list of the others."""
    made_with = [flattened(group.settings) for group in groups]
    keys = sorted({key for settings in made_with for key in settings}, key=lambda key: (key != "seed", key))
    differing = [key for key in keys if any(each.get(key) != made_with[0].get(key) for each in made_with)]
    rows = [[key, *(escape(_plain(settings, key)) for settings in made_with)] for key in differing]
    table = _folded(["setting", *(group.label for group in groups)], rows)
    shared = "\n".join(f"{key}: {_plain(made_with[0], key)}" for key in keys if key not in differing)
    title = "Shared settings" if rows else "All settings"
    return (
        f"<h2>Settings</h2>{table if rows else ''}"
        f"<details><summary>{title}</summary><pre>{escape(shared)}</pre></details>"
    )


def _plain(settings: Mapping[str, object], key: str) -> str:
    if key not in settings:
        return "-"
    return written(settings[key])


def _folded(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of settings, folded where it has many rows."""
    opened = " open" * (len(rows) <= _MOST_ROWS)
    return f"<details{opened}><summary>{len(rows)} settings differ</summary>{_wide(head, rows)}</details>"


def _wide(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls if it is too wide; cells are HTML, the first of each row is text."""
    lines = [
        ("th", list(map(escape, head))),
        *(("td", [_BREAK_AFTER.sub(r"\1<wbr>", escape(row[0])), *row[1:]]) for row in rows),
    ]
    first, *others = ("".join(f"<{tag}>{cell}</{tag}>" for cell in line) for tag, line in lines)
    body = "".join(f"<tr>{row}</tr>" for row in others)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def _page(
    title: str,
    sentences: Sequence[str],
    top: str,
    table: str,
    figures: Sequence[go.Figure],
    details: str = "",
    notes: Sequence[str] = (),
) -> str:
    head = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    head += top + "".join(f"<p>{escape(text)}</p>" for text in sentences)
    drawn = "\n".join(
        f'<div class="wide"><div class="figure">{to_html(figure, **_HTML)}</div></div>' for figure in figures
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{escape(title)}</h1>{head}{table}\n{drawn}\n{details}</body></html>\n"
    )
