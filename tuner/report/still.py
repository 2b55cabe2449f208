"""The same charts for paper, with matplotlib: PNG files, since plotly's own need a browser."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from tuner.report.chart import STYLES, Axis, Chart, Panel, Series, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS_PER_INCH = 144
PANEL_WIDTH_IN, PIXELS_PER_INCH = 6.4, 96
_MARKERS = {"circle": "o", "diamond": "D", "star": "*", "x": "x", "square": "s", "triangle": "^"}
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}


def png(chart: Chart) -> bytes:
    """Return the chart as a PNG file."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = max(len(chart.panels), 1)
    rows, columns = (count, 1) if chart.stacked else (1, count)
    width = PANEL_WIDTH_IN * max(1.3 if columns == 1 else columns, 1.0)
    height = chart.panel_height / PIXELS_PER_INCH * rows + 1.1
    with rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#E3E3E3",
            "legend.frameon": False,
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False, sharex=chart.stacked).ravel()
        for index, (panel, axes) in enumerate(zip(chart.panels, grid, strict=False)):
            _draw(axes, panel)
            if chart.stacked and index < count - 1:
                axes.set_xlabel("")
        caption = "\n".join(textwrap.wrap(chart.caption, int(width * 16)))
        figure.suptitle(chart.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#444444")
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=DOTS_PER_INCH)
    return data.getvalue()


def _draw(axes: Axes, panel: Panel) -> None:
    for series in panel.series:
        style = STYLES[series.role]
        if series.bars:
            axes.barh(np.array(series.y, dtype=np.float64), np.array(series.x, dtype=np.float64), color=style.colour)
        else:
            _draw_points(axes, series, style)
    if panel.title:
        axes.set_title(panel.title, loc="left")
    _scale(axes, panel.x, "x")
    _scale(axes, panel.y, "y")
    if any(s.in_legend for s in panel.series) and len(panel.series) > 1:
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2)


def _draw_points(axes: Axes, series: Series, style: Style) -> None:
    x, y = np.array(series.x, dtype=np.float64), np.array(series.y, dtype=np.float64)
    # matplotlib measures marker and line in points, plotly in pixels.
    axes.errorbar(
        x,
        y,
        xerr=_bars(x, series.x_interval),
        yerr=_bars(y, series.y_interval),
        label=series.name if series.in_legend else None,
        color=style.colour,
        alpha=style.opacity,
        marker=_MARKERS[style.symbol] if style.symbol else "none",
        markersize=style.size * 0.72,
        markerfacecolor="none" if style.symbol == "triangle" else style.colour,
        linestyle=_DASHES[style.line] if style.line else "none",
        linewidth=style.width * 0.75,
        drawstyle="steps-post" if style.step else "default",
        elinewidth=0.8,
        capsize=2.0,
    )


def _bars(values: np.ndarray, ends: tuple[tuple[float, float], ...]) -> np.ndarray | None:
    if not ends:
        return None
    pairs = np.array(ends, dtype=np.float64)
    distances: np.ndarray = np.maximum(np.array([values - pairs[:, 0], pairs[:, 1] - values]), 0.0)
    return distances


def _scale(axes: Axes, axis: Axis, which: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    target = axes.xaxis if which == "x" else axes.yaxis
    target.set_label_text(axis.title)
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        target.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        target.set_major_formatter(ScalarFormatter())
        target.set_minor_formatter(NullFormatter())
    if axis.ticks:
        target.set_ticks(list(axis.ticks), [text.replace("<br>", "\n") for text in axis.ticks.values()], fontsize=7)
