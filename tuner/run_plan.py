"""What one run of a study may use, and how its engines are to measure, as the study file asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from objectives.early_end import Bar, bar
from tuner.engine.protocol import MeasurePlan
from tuner.ledger import History
from tuner.night import CLOSING_S, Limits
from tuner.pace import FIRST_GUESS_S, TWIN_GUESS_S
from tuner.spec import Measure, Search
from tuner.study_file import StudyFile
from tuner.view import Objective, view


def measure_plan(measure: Measure, salt: int, log_path: Path) -> MeasurePlan:
    """Say how an engine is to be measured, as the study file asks; `salt` must be fresh for each measurement."""
    return MeasurePlan(
        repeats=measure.repeats,
        speed_probe=measure.speed_probe,
        salt=salt,
        start_budget_s=measure.start_budget_s,
        run_budget_s=measure.run_budget_s,
        stop_budget_s=measure.stop_budget_s,
        log_path=log_path,
    )


def limits_of(file: StudyFile, trials: int | None) -> Limits:
    """What one run of a study may use; `trials` instead of the study file's where it is given."""
    is_twin = file.spec.engine.backend == "twin"
    return Limits(
        trials=trials if trials is not None else file.spec.budget.trials,
        rounds=file.spec.confirm.rounds,
        first_guess_s=TWIN_GUESS_S if is_twin else FIRST_GUESS_S,
        closing_s=TWIN_GUESS_S if is_twin else CLOSING_S,
        engines=1 if is_twin or file.spec.resources.engines == "all" else file.spec.resources.engines,
    )


def bars_of(history: History, objectives: Sequence[Objective], search: Search) -> tuple[Bar, ...]:
    """Return the members of the front that a run is held against; none where runs are never ended early."""
    if not search.end_dominated:
        return ()
    shown = view(history, objectives)
    members = ((n, shown.results[n].values) for n in shown.front)
    return tuple(bar(n, {o.name: values[o.name] for o in objectives}, shown.noise) for n, values in members)
