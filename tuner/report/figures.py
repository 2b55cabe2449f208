"""All figures of a study, and their files: one page that needs no network and one PNG a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import StoreError
from tuner.report import interactive, still
from tuner.report.chart import Chart
from tuner.report.charts import (
    front_chart,
    hypervolume_chart,
    importance_chart,
    prompt_length_chart,
)
from tuner.report.charts_of_tables import distribution_chart, night_chart
from tuner.report.parallel import parameters_chart
from tuner.view import StudyView


def study_charts(study: StudyView, folder: Path) -> list[Chart]:
    """Return every figure that the study can fill, in the order in which a reader asks for them."""
    charts = [
        front_chart(study),
        parameters_chart(study),
        importance_chart(study),
        hypervolume_chart(study),
        prompt_length_chart(study),
        distribution_chart(study, folder),
        night_chart(study, folder),
    ]
    return [c for c in charts if c is not None and any(series.x for panel in c.panels for series in panel.series)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart with its PNG file, so that nobody has to draw it a second time."""

    chart: Chart
    png: bytes


def write_figures(study: StudyView, folder: Path, into: Path, places: Mapping[int, str] | None = None) -> list[Drawn]:
    """Write `NAME.html` and `NAME.png` of every figure and return what was drawn.

    Parameters
    ----------
    folder:
        Of the study, with `trials/N/`.
    places:
        Trial number -> where to find the trial, which a click on its point shows.

    Raises
    ------
    StoreError
        When the file system refuses.
    """
    return write_charts(study_charts(study, folder), into, places)


def write_charts(charts: Sequence[Chart], into: Path, places: Mapping[int, str] | None = None) -> list[Drawn]:
    """Write these charts only; as `write_figures`."""
    drawn = [Drawn(chart, still.png(chart)) for chart in charts]
    try:
        into.mkdir(parents=True, exist_ok=True)
        for figure in drawn:
            page = interactive.page(figure.chart, places)
            (into / f"{figure.chart.name}.html").write_text(page, encoding="utf-8")
            (into / f"{figure.chart.name}.png").write_bytes(figure.png)
    except OSError as error:
        raise StoreError(f"{into}: the figures cannot be written ({error.strerror}); free or mend it") from error
    return drawn
