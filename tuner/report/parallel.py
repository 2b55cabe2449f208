"""Parallel coordinates: one line a trial over its parameters and objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.ledger import TrialRecord, TrialState
from tuner.report.chart import Axis, Chart, Panel, Series
from tuner.report.charts import titled, trial_text
from tuner.report.words import label, quantity, value_text
from tuner.view import StudyView

_LINE_NAMES = {
    "trial line": "other complete trials",
    "front trial line": "front",
    "reference line": "defaults",
    "knee line": "knee",
}


@dataclass(frozen=True, slots=True)
class _ParallelAxis:
    """One vertical axis: the place of each trial on it from 0 to 1, by number."""

    title: str
    least: str
    most: str
    places: Mapping[int, float]


def parameters_chart(study: StudyView) -> Chart:
    """Draw each complete trial as a line over its parameters (by rank of value) and objectives (by value)."""
    axes = [*_parameter_axes(study), *_objective_axes(study)]
    groups: dict[str, list[TrialRecord]] = {role: [] for role in _LINE_NAMES}
    for trial in study.trials:
        if role := _line_role(study, trial):
            groups[role].append(trial)
    series = [_lines(study, trials, role, axes) for role, trials in groups.items() if trials]
    ticks = {float(i): f"{axis.title}<br>{axis.least} … {axis.most}" for i, axis in enumerate(axes)}
    panel = Panel(
        Axis("parameter or objective, with its range", ticks=ticks), Axis("place in its range"), tuple(series)
    )
    caption = (
        "One line a complete trial; a parameter's values stand in their order, an objective by its value. "
        "Thick lines are on the front."
    )
    return Chart("parameters", titled(study, "Parameters and objectives"), caption, (panel,), panel_height=460)


def _lines(study: StudyView, trials: Sequence[TrialRecord], role: str, axes: Sequence[_ParallelAxis]) -> Series:
    """All trials of a role as one series, a gap between two of them."""
    x: list[float | None] = []
    y: list[float | None] = []
    hover: list[str] = []
    for trial in trials:
        x += [*map(float, range(len(axes))), None]
        y += [*(axis.places.get(trial.number) for axis in axes), None]
        hover += [trial_text(study, trial)] * (len(axes) + 1)
    numbers = tuple(trial.number for trial in trials for _ in range(len(axes) + 1))
    return Series(_LINE_NAMES[role], role, tuple(x), tuple(y), hover=tuple(hover), trials=numbers)


def _line_role(study: StudyView, trial: TrialRecord) -> str | None:
    if trial.predicted != study.predicted or trial.state is not TrialState.COMPLETE:
        return None
    if trial.number == study.knee:
        return "knee line"
    if study.reference is not None and trial.number == study.reference.number:
        return "reference line"
    return "front trial line" if trial.number in study.front else "trial line"


def _parameter_axes(study: StudyView) -> list[_ParallelAxis]:
    axes = []
    for name in dict.fromkeys(name for trial in study.trials for name in trial.params):
        values = {t.number: t.params[name] for t in study.trials if name in t.params}
        order = sorted({value_text(v): v for v in values.values()}.values(), key=_sort_key)
        if len(order) > 1:
            rank = {value_text(v): i / (len(order) - 1) for i, v in enumerate(order)}
            places = {number: rank[value_text(v)] for number, v in values.items()}
            axes.append(_ParallelAxis(name, value_text(order[0]), value_text(order[-1]), places))
    return axes


def _objective_axes(study: StudyView) -> list[_ParallelAxis]:
    axes = []
    for objective in study.objectives:
        values = {t.number: v for t in study.trials if (v := study.values(t).get(objective.name)) is not None}
        if values:
            low, high = min(values.values()), max(values.values())
            places = {number: (v - low) / ((high - low) or 1.0) for number, v in values.items()}
            ends = quantity(low, objective.unit), quantity(high, objective.unit)
            axes.append(_ParallelAxis(label(objective.name), *ends, places))
    return axes


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, float(value), "")
    return (1, 0.0, value_text(value))
