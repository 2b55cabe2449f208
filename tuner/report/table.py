"""The front as rows: each objective with interval and change against the defaults, and what was changed for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from objectives.speed import distinguishable
from tuner.view import Objective, StudyView, changed_params


@dataclass(frozen=True, slots=True)
class Cell:
    """One objective of one trial.

    Parameters
    ----------
    change:
        Relative to the reference, -0.31 is 31% less; `None` for the reference itself or without one.
    better:
        Whether that change is for the better, for the worse (`False`), or within noise or zero (`None`).
    """

    objective: Objective
    value: float
    interval: tuple[float, float] | None
    change: float | None
    better: bool | None


@dataclass(frozen=True, slots=True)
class Row:
    """One trial of the table; `changed` holds the parameters that differ from the defaults, `verified` whether `tuner
    verify` found it better than them."""

    number: int
    reference: bool
    pareto: bool
    knee: bool
    measurements: int
    cells: tuple[Cell, ...]
    changed: Mapping[str, Any]
    verified: bool = False


def front_rows(study: StudyView) -> list[Row]:
    """Return the reference first, if it was measured, then the front from the best first objective to the worst."""
    numbers = list(study.front)
    reference = study.reference
    if reference is not None and reference.score is not None and reference.number not in numbers:
        numbers.insert(0, reference.number)
    return [row for number in numbers if (row := trial_row(study, number)) is not None]


def trial_row(study: StudyView, number: int) -> Row | None:
    """Return the row of any trial; `None` when it lacks an objective."""
    trial = study.trial(number)
    values, intervals = study.values(trial), study.intervals(trial)
    if any(o.name not in values for o in study.objectives):
        return None
    return Row(
        number=number,
        reference=study.reference is not None and study.reference.number == number,
        pareto=number in study.front,
        knee=number == study.knee,
        measurements=study.results[number].measurements if number in study.results else 1,
        cells=tuple(_cell(study, o, values[o.name], intervals.get(o.name)) for o in study.objectives),
        changed=changed_params(study, trial),
        verified=study.is_verified(number),
    )


def _cell(study: StudyView, objective: Objective, value: float, interval: tuple[float, float] | None) -> Cell:
    reference = study.reference
    base = study.values(reference).get(objective.name) if reference is not None else None
    if reference is None or not base or value == base:
        return Cell(objective, value, interval, None, None)
    change = value / base - 1.0
    beyond_noise = distinguishable(value, base, study.noise.get(objective.name, 0.0))
    overlap = _overlap(interval, study.intervals(reference).get(objective.name))
    better = (change < 0) == (objective.direction == "minimize") if beyond_noise and not overlap else None
    return Cell(objective, value, interval, change, better)


def _overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]
