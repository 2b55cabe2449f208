"""Charts for the screen, with plotly: pages and fragments that need no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from tuner.report.chart import STYLES, Axis, Chart, Series, Style

if TYPE_CHECKING:
    import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
GRID = "#E3E3E3"
_SYMBOLS = {
    "circle": "circle",
    "diamond": "diamond",
    "star": "star",
    "x": "x-thin",
    "square": "square",
    "triangle": "triangle-up-open",
}
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ margin: 12px; font: 14px/1.4 {font}; color: #222; }} h1 {{ font-size: 18px; margin: 0; }}
p {{ margin: 4px 0; color: #666; }} #picked {{ min-height: 1.4em; color: #222; overflow-wrap: anywhere; }}</style>
</head><body><h1>{title}</h1><p>{caption}</p><p id="picked"></p>
{plot}
</body></html>
"""

# MLflow shows pages in a sandbox that may not open windows: a click writes the address down instead.
_SHOW_PICKED = """
var places = %s;
document.getElementById('{plot_id}').on('plotly_click', function (event) {
  var trial = event.points.length ? event.points[0].customdata : undefined;
  if (trial !== undefined && places[trial]) {
    document.getElementById('picked').textContent = 'Trial ' + trial + ': ' + places[trial];
  }
});
"""


def page(chart: Chart, places: Mapping[int, str] | None = None) -> str:
    """Return a whole HTML page with the chart and everything that it needs.

    Parameters
    ----------
    places:
        Trial number -> where to find the trial, which a click on its point shows.
    """
    scripts = [_SHOW_PICKED % json.dumps(dict(places))] if places else None
    plot = figure(chart).to_html(include_plotlyjs=True, full_html=False, config=_CONFIG, post_script=scripts)
    return _PAGE.format(title=escape(chart.title), caption=escape(chart.caption), font=FONT, plot=plot)


def fragment(chart: Chart) -> str:
    """Return the chart as a `<div>` for a page that has plotly's script already."""
    html: str = figure(chart).to_html(include_plotlyjs=False, full_html=False, config=_CONFIG)
    return html


def script() -> str:
    """Return plotly's own script, to be put on a page once."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def figure(chart: Chart) -> go.Figure:
    """Draw the chart without its title and caption, which are the page's."""
    from plotly.subplots import make_subplots

    count = len(chart.panels)
    rows, columns = (count, 1) if chart.stacked else (1, max(count, 1))
    drawn = make_subplots(
        rows,
        columns,
        subplot_titles=[p.title for p in chart.panels] if any(p.title for p in chart.panels) else None,
        shared_xaxes=chart.stacked,
        vertical_spacing=0.24 / rows,
        horizontal_spacing=0.24 / columns,
    )
    shown: set[str] = set()
    for index, panel in enumerate(chart.panels):
        row, column = (index + 1, 1) if chart.stacked else (1, index + 1)
        for series in panel.series:
            legend = series.in_legend and series.name not in shown
            shown |= {series.name} if legend else set()
            drawn.add_trace(_trace(series, STYLES[series.role], legend), row=row, col=column)
        last = not chart.stacked or index == count - 1
        drawn.update_xaxes(**_axis(panel.x), row=row, col=column, title_text=panel.x.title if last else None)
        drawn.update_yaxes(**_axis(panel.y), row=row, col=column, title_text=panel.y.title)
    height = chart.panel_height * (rows if chart.stacked else 1) + 120
    drawn.update_layout(**_layout(), height=height)
    return drawn


def _trace(series: Series, style: Style, legend: bool) -> go.Scatter | go.Bar:
    import plotly.graph_objects as go

    shared = {
        "x": series.x,
        "y": series.y,
        "name": series.name,
        "showlegend": legend,
        "legendgroup": series.name,
        "customdata": series.trials or None,
        "hovertext": series.hover or None,
        "hoverinfo": "text" if series.hover else "x+y+name",
    }
    if series.bars:
        return go.Bar(**shared, orientation="h", marker_color=style.colour)
    mode = "+".join(filter(None, ("lines" if style.line else "", "markers" if style.symbol else "")))
    return go.Scatter(
        **shared,
        mode=mode,
        opacity=style.opacity,
        line={
            "color": style.colour,
            "width": style.width,
            "dash": style.line,
            "shape": "hv" if style.step else "linear",
        },
        marker={
            "color": style.colour,
            "size": style.size,
            "symbol": _SYMBOLS[style.symbol] if style.symbol else None,
            "line": {
                "width": 2 if style.symbol == "x" else 1,
                "color": style.colour if style.symbol == "x" else "white",
            },
        },
        error_x=_bars(series.x, series.x_interval, style),
        error_y=_bars(series.y, series.y_interval, style),
    )


def _bars(
    values: tuple[float | None, ...], ends: tuple[tuple[float, float], ...], style: Style
) -> dict[str, Any] | None:
    if not ends:
        return None
    pairs = [(v if v is not None else low, low, high) for v, (low, high) in zip(values, ends, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, high - v) for v, _, high in pairs],
        "arrayminus": [max(0.0, v - low) for v, low, _ in pairs],
        "color": style.colour,
        "thickness": 1,
        "width": 3,
    }


def _axis(axis: Axis) -> dict[str, Any]:
    settings: dict[str, Any] = {"showgrid": True, "gridcolor": GRID, "zeroline": False, "linecolor": "#444444"}
    settings |= {"ticks": "outside", "title_standoff": 12, "automargin": True}
    if axis.log:
        settings |= {"type": "log", "dtick": "D2"}
    if axis.ticks:
        settings |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": list(axis.ticks.values())}
    return settings


def _layout() -> dict[str, Any]:
    return {
        "template": "none",
        "font": {"family": FONT, "size": 13, "color": "#222222"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hoverlabel": {"align": "left", "bgcolor": "white", "font": {"family": FONT, "size": 13}},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "margin": {"l": 70, "r": 24, "t": 50, "b": 70},
    }
