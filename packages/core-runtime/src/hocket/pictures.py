"""Figures that are drawn into files, where matplotlib is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.installing import how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The message if no figure can be drawn.
NO_PICTURE = f"no picture: {how_to_install('hocket-core', 'plot')}"


def new_figure(width: float, height: float) -> Figure | None:
    """Return an empty figure, its size in inches, without a screen; None if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
