"""From a measurement to a score, by what a study asks for: joins the study file and `objectives.score`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from objectives.constraints import Constraint
from objectives.measurement import Measurement
from objectives.metrics import Direction, lookup
from objectives.score import Score, UserMetric, score
from objectives.validity import Expectations, Reference, ValidityLimits
from tuner.errors import StudyFileError
from tuner.study_file import StudyFile
from tuner.view import Objective
from tuner.workload.model import Workload


def objectives_of(file: StudyFile) -> tuple[Objective, ...]:
    """Return the study's objectives with unit and direction; corrected ones where the study corrects for drift."""
    found = []
    for objective in file.spec.objectives:
        if ":" in objective.metric:
            direction: Direction = objective.direction or "minimize"
            found.append(Objective(objective.metric, "", direction))
            continue
        metric = lookup(objective.metric)
        corrected = file.spec.measure.drift == "correct" and metric.speed != "none"
        name = metric.name + ("_corrected" if corrected else "")
        found.append(Objective(name, metric.unit, objective.direction or metric.direction))
    return tuple(found)


def user_metrics(file: StudyFile) -> dict[str, UserMetric]:
    """Import the metrics that a study names as `module:function`, from the study file's own folder only.

    Raises
    ------
    StudyFileError
        When a module or function is not there.
    """
    names = [o.metric for o in file.spec.objectives if ":" in o.metric]
    names += [m for c in file.spec.constraints if ":" in (m := Constraint.parse(c).metric)]
    return {name: _load(file, name) for name in dict.fromkeys(names)}


def _load(file: StudyFile, name: str) -> UserMetric:
    module_name, _, function_name = name.partition(":")
    path = file.folder / Path(*module_name.split(".")).with_suffix(".py")
    if not path.is_file():
        raise StudyFileError(str(file.path), [("objectives", f"{name}: there is no {path} beside the study file")])
    folder = str(file.folder)
    sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise StudyFileError(str(file.path), [("objectives", f"{name}: {path} has no function {function_name}")])
    metric: UserMetric = function
    return metric


def judge(
    file: StudyFile,
    measurement: Measurement,
    workload: Workload,
    reference: Reference | None,
    metrics: Mapping[str, UserMetric],
) -> Score:
    """Score one measurement. `reference` is `None` for the first reference itself."""
    spec = file.spec
    return score(
        measurement,
        expectations=Expectations(
            requests=len(workload.requests),
            output_tokens=sum(r.output_tokens for r in workload.requests),
            shares_prefixes=workload.shares_prefixes,
            objectives=tuple(o.name for o in objectives_of(file)),
        ),
        constraints=[Constraint.parse(text) for text in spec.constraints],
        limits=ValidityLimits(
            client_lateness_p99_s=spec.measure.max_send_lateness_s,
            speed_ratio=spec.measure.speed_change_limit,
            min_requests=spec.measure.min_requests,
        ),
        reference=reference or (Reference.of(measurement) if spec.measure.drift == "correct" else None),
        slo=spec.slo or None,
        user_metrics=metrics,
        correct_speed=spec.measure.drift == "correct",
    )
