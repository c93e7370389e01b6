"""Pages of one run or several: one file each, with plotly's own JavaScript in it, so that it opens anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go
import yaml
from plotly.colors import qualitative
from plotly.io import to_html
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from hocket.comparison.group import Curve, Group
from hocket.comparison.measure import Measure, Target
from hocket.comparison.record import Record
from hocket.training.history import is_number, metric_names

__all__ = ["comparison_page", "run_page"]

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
_RANK_MARKER = {"size": 8, "color": qualitative.Plotly[0]}
# With so many points or more, lines go without markers.
_FEW = 60
_DASHES = ("solid", "dash", "dot")
_CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2em auto; max-width: 1280px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 0.85em; }
th, td { padding: 0.4em 0.6em; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.note { background: #fff3cd; padding: 0.6em 1em; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


@dataclass(frozen=True)
class _Line:
    """A curve with its name, and its place among others."""

    label: str
    place: int
    curve: Curve

    @property
    def style(self) -> dict[str, str]:
        """Colour and dashes: lines that lie on each other are both seen."""
        colours = qualitative.Plotly
        return {"color": colours[self.place % len(colours)], "dash": _DASHES[self.place % len(_DASHES)]}


#: Returns the lines of a metric (`Record.series`) over a key of rows.
_Lines = Callable[[str, str], list[_Line]]


def comparison_page(
    groups: Sequence[Group], columns: Sequence[Measure], target: Target | None, notes: Sequence[str]
) -> str:
    """Return a page that compares runs.

    Args:
        groups: runs that differ by their seeds only are one.
        columns: of the table.
        target: what times and bytes are counted to.
        notes: what a reader has to know.
    """
    records = [record for group in groups for record in group.records]
    told = [f"Target: {target}."] if target else []
    if len(records) > len(groups):
        told.append("Lines are means over seeds; bands reach one standard deviation to both sides.")

    def lines(name: str, over: str) -> list[_Line]:
        return [_Line(g.label, place, g.curve(name, over)) for place, g in enumerate(groups)]

    figures = _figures(records, lines, "step")
    return _page("Comparison of runs", told, _table(groups, columns), figures, notes=notes)


def run_page(record: Record, columns: Sequence[Measure], title: str) -> str:
    """Return the page of one run: its cost, its metrics, and how far its ranks are apart."""
    group = Group(record.label, [record])

    def lines(name: str, over: str) -> list[_Line]:
        of_ranks = group.ranks_curve(name, over)
        return [_Line(record.label, 0, of_ranks if of_ranks.x else group.curve(name, over))]

    figures = [*_figures([record], lines, "seconds"), *_by_rank(record)]
    told = [f"Task {record.task['name']}, {record.ranks} ranks over {record.transport}."]
    if record.ranks > 1:
        told.append("Bands reach from the smallest rank's value to the largest rank's.")
    config = escape(yaml.safe_dump(record.config, sort_keys=False))
    return _page(title, told, _table([group], columns), figures, f"<h2>Configuration</h2><pre>{config}</pre>")


def _figures(records: Sequence[Record], lines: _Lines, cost_over: str) -> list[go.Figure]:
    """Return what communication cost, and each metric over steps, seconds and bytes."""
    names = dict.fromkeys(["train_loss", *(name for record in records for name in metric_names(record.rows))])
    costs = [name for name in _COST if any(value for r in records for _, value in r.series(name))]
    panels = [(_COST[name], name, cost_over) for name in costs]
    return [
        *([_figure("What communication cost", panels, lines)] if panels else []),
        *(_figure(name, [(name, name, over) for over in _OVER], lines) for name in names),
    ]


def _figure(title: str, panels: Sequence[tuple[str, str, str]], lines: _Lines) -> go.Figure:
    """Return a row of panels.

    Args:
        title: of all of them.
        panels: each one's y axis, what it shows, and the key of rows over which.
        lines: what is drawn.
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
    figure.update_layout(title=title, height=_HEIGHT, template="plotly_white", margin={"t": 60, "b": 60})
    figure.update_layout(legend={"orientation": "h", "y": -0.25})
    return figure


def _traces(line: _Line, name: str, over: str, named: bool) -> Iterator[go.Scatter]:
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
    """Yield what each rank's own replica has reached at the end, and how long each rank waited."""
    summary = record.summary or {}
    found = {
        name.removesuffix(_RANKS): values
        for name, values in summary.items()
        if name.endswith(_RANKS) and len(values) > 1 and all(map(is_number, values))
    }
    names = list(found)
    for start in range(0, len(names), _COLUMNS):
        title = "" if start else "The ranks at the end"
        yield _rank_figure({name: found[name] for name in names[start : start + _COLUMNS]}, title)


def _rank_figure(values_by_name: Mapping[str, Sequence[float]], title: str) -> go.Figure:
    figure = make_subplots(cols=_COLUMNS, horizontal_spacing=_SPACING)
    for column, (name, values) in enumerate(values_by_name.items(), start=1):
        scaled = [value * _SCALES.get(name, 1.0) for value in values]
        dots = go.Scatter(
            x=list(range(len(values))), y=scaled, mode="markers", marker=_RANK_MARKER, showlegend=False
        )
        figure.add_trace(dots, row=1, col=column)
        label = _COST["wait_share"] if name == _WAIT_SHARE else name
        figure.update_xaxes(title_text="rank", row=1, col=column)
        figure.update_yaxes(title_text=label, row=1, col=column)
    figure.update_layout(title=title, height=_HEIGHT, template="plotly_white")
    return figure


def _table(groups: Sequence[Group], columns: Sequence[Measure]) -> str:
    lines = [["run", *(column.name for column in columns)]]
    lines += [[group.label, *(column.cell(group) for column in columns)] for group in groups]
    head, *rows = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line)
        for tag, line in zip(["th", *("td" for _ in groups)], lines, strict=True)
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _page(
    title: str,
    told: Sequence[str],
    table: str,
    figures: Sequence[go.Figure],
    details: str = "",
    notes: Sequence[str] = (),
) -> str:
    head = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    head += "".join(f"<p>{escape(text)}</p>" for text in told)
    drawn = "\n".join(
        to_html(figure, include_plotlyjs=False, full_html=False, config=_CONFIG) for figure in figures
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{escape(title)}</h1>{head}{table}\n{drawn}\n{details}</body></html>\n"
    )
