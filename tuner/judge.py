"""From a measurement to a score, by what a study asks for: joins the study file and `objectives.score`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

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
    """Load the metrics that a study names as `module:function`, from the study file's own folder only.

    Raises
    ------
    StudyFileError
        When a module or function is not there, or the module cannot be imported.
    """
    spec = file.spec
    named = [(f"objectives.{i}", o.metric) for i, o in enumerate(spec.objectives)]
    named += [(f"constraints.{i}", Constraint.parse(c).metric) for i, c in enumerate(spec.constraints)]
    return {name: _load(file, key, name) for key, name in named if ":" in name}


def _load(file: StudyFile, key: str, name: str) -> UserMetric:
    module_name, _, function_name = name.partition(":")
    path = file.folder.joinpath(*module_name.split(".")).with_suffix(".py")
    if not path.is_file():
        raise StudyFileError(str(file.path), [(key, f"{name}: there is no {path}; put it beside the study file")])
    try:
        found = getattr(_module(path, file.folder), function_name, None)
    except Exception as error:  # the operator's code may raise anything while it is imported
        text = f"{name}: {path} cannot be imported ({type(error).__name__}: {error}); mend it"
        raise StudyFileError(str(file.path), [(key, text)]) from error
    if not callable(found):
        raise StudyFileError(str(file.path), [(key, f"{name}: {path} has no function {function_name}; correct it")])
    metric: UserMetric = found
    return metric


def _module(path: Path, folder: Path) -> ModuleType:
    """Import a file under a name of its own, so that no installed module of the same name can stand in for it.

    While it is imported it finds modules beside the study file.
    """
    name = f"_study_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def expectations_of(workload: Workload, objectives: Iterable[str] = ()) -> Expectations:
    """Return what a measurement of a workload has to show, for these objectives."""
    return Expectations(
        requests=len(workload.requests),
        output_tokens=sum(r.output_tokens for r in workload.requests),
        shares_prefixes=workload.shares_prefixes,
        objectives=tuple(objectives),
    )


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
        expectations=expectations_of(workload, [o.name for o in objectives_of(file)]),
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
