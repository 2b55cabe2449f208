"""A study as its readers see it: the front, the knee and the noise, computed from the ledger's history.

Pure functions. The command line, the tracking, the report and the exports all read a `StudyView`, so that they cannot
disagree about which trials are on the front.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from objectives import pareto
from objectives.memory import memory_violation
from objectives.metrics import Direction
from objectives.speed import noise_floor
from tuner.drift import INTERFERENCE
from tuner.ledger import History, StudyHeader, StudyNote, TrialRecord, TrialState, Verification
from tuner.secrets import mask_tree, secret_values

HYPERVOLUME_CORNER = 2.0
"""Corner of the hypervolume on every axis, as a multiple of the reference's value: a configuration that is twice as
bad as vLLM's defaults on one objective adds nothing, and the defaults alone have a hypervolume of exactly 1."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is optimised: a metric of the score, its unit ("s", "1/s", "GiB" or ""), and which way is better."""

    name: str
    unit: str
    direction: Direction = "minimize"


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one configuration, over all its valid measurements.

    Parameters
    ----------
    number:
        The trial that stands for the configuration: the first one that measured it.
    values, intervals:
        Median over the measurements, metric by metric; those of the trial itself where there is one measurement.
    measurements:
        How many there are.
    """

    number: int
    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    measurements: int


@dataclass(frozen=True, slots=True)
class StudyView:
    """One study, ready to be shown.

    Parameters
    ----------
    results:
        Every configuration that may be on the front, by the number of the trial that stands for it.
    front:
        Numbers of the trials on the front, best first objective first.
    knee:
        The trial that gives up least of either objective; `None` while there is no front.
    hypervolume:
        Of the front, in units of the reference's: 1 is the defaults alone; `None` without a reference or where a
        value is not positive.
    noise:
        Objective -> noise floor: the relative difference that two measurements of one configuration stay below with
        95% probability, from the configuration that was measured most often; empty when none was measured twice.
    predicted:
        Whether everything here comes from the twin.
    """

    header: StudyHeader | None
    objectives: tuple[Objective, ...]
    trials: tuple[TrialRecord, ...]
    reference: TrialRecord | None
    results: Mapping[int, Result]
    front: tuple[int, ...]
    knee: int | None
    hypervolume: float | None
    noise: Mapping[str, float]
    verifications: tuple[Verification, ...]
    notes: tuple[StudyNote, ...]
    predicted: bool

    @property
    def study(self) -> str:
        """Name of the study."""
        return self.header.study if self.header else ""

    @property
    def started_at(self) -> float:
        """When the first trial began, in Unix seconds; 0 before that."""
        return min((t.started_at for t in self.trials), default=0.0)

    @property
    def finished_count(self) -> int:
        """How many trials are over."""
        return sum(t.state is not TrialState.RUNNING for t in self.trials)

    @property
    def in_doubt(self) -> frozenset[int]:
        """Trials that lie between two measurements of the reference across which the machine drifted."""
        drifts = [
            note.values for note in self.notes if note.code == "drift" and {"since", "until"} <= note.values.keys()
        ]
        spans = [(values["since"], values["until"]) for values in drifts]
        return frozenset(t.number for t in self.trials if any(low < t.number < high for low, high in spans))

    def trial(self, number: int) -> TrialRecord:
        """Return the trial of this number."""
        return next(t for t in self.trials if t.number == number)

    def verification(self, number: int) -> Verification | None:
        """Return what the latest verification of a trial said."""
        return next((v for v in reversed(self.verifications) if v.number == number), None)

    def is_verified(self, number: int) -> bool:
        """Whether measuring the trial again, in turns with the defaults, found it better; the defaults need not be."""
        last = self.verification(number)
        is_reference = self.reference is not None and self.reference.number == number
        return last is not None and (is_reference or last.found_better)

    def values(self, trial: TrialRecord) -> Mapping[str, float]:
        """Metrics to show for a trial: over all measurements of its configuration if it stands for one."""
        if trial.number in self.results:
            return self.results[trial.number].values
        return trial.score.values if trial.score else {}

    @property
    def same_within_noise(self) -> tuple[tuple[int, int], ...]:
        """Pairs of the front that no objective tells apart: no more than noise between them, or intervals that overlap.

        Empty while no configuration was measured twice: the noise is unknown then.
        """
        if not self.noise:
            return ()
        members = [self.results[number] for number in self.front]
        judged = pareto.front_with_noise(
            points([m.values for m in members], self.objectives),
            directions(self.objectives),
            intervals=[[m.intervals.get(o.name) for o in self.objectives] for m in members],
            floors=[self.noise.get(o.name) for o in self.objectives],
        )
        return tuple((self.front[m.row], self.front[b]) for m in judged for b in m.same_as if m.row < b)

    @property
    def runners_up(self) -> tuple[int, ...]:
        """Numbers of trials that would be on the front if its members were worse by as much as two measurements differ.

        Empty while no configuration was measured twice: the noise is unknown then.
        """
        others = [n for n in self.results if n not in self.front]
        if not self.noise or not others:
            return ()
        best, rest = (
            points([self.results[n].values for n in numbers], self.objectives) for numbers in (self.front, others)
        )
        sign = np.array([1.0 if d == "minimize" else -1.0 for d in directions(self.objectives)])
        floors = np.array([self.noise.get(o.name, 0.0) for o in self.objectives])
        worse = best * sign + np.abs(best) * floors
        beaten = (worse[:, None, :] <= (rest * sign)[None, :, :]).all(axis=2).any(axis=0)
        return tuple(n for n, lost in zip(others, beaten, strict=True) if not lost)

    def intervals(self, trial: TrialRecord) -> Mapping[str, tuple[float, float]]:
        """95% intervals that belong to `values`."""
        if trial.number in self.results:
            return self.results[trial.number].intervals
        return trial.score.intervals if trial.score else {}


def view(history: History, objectives: Sequence[Objective]) -> StudyView:
    """Compute what the readers of a study see.

    The front holds complete trials only, each configuration once. Trials that were measured again count with the
    median of their measurements; a configuration that was infeasible on any of them is off the front. In a study that
    has measured trials, predicted ones are left out. Where engines on one machine are known to disturb each other, what
    was measured alone counts.
    """
    scored = {t.predicted for t in history.finished if t.score is not None}
    predicted = scored == {True}
    candidates = [t for t in history.finished if t.score is None or t.predicted == predicted]
    if any(note.code == INTERFERENCE for note in history.notes):
        candidates = _alone_where_known(candidates)
    results = {r.number: r for r in _results(candidates, objectives)}
    numbers = list(results)
    front = tuple(numbers[i] for i in front_of([results[n].values for n in numbers], objectives))
    reference = history.reference
    return StudyView(
        header=history.header,
        objectives=tuple(objectives),
        trials=history.trials,
        reference=reference,
        results=results,
        front=front,
        knee=front[knee_of([results[n].values for n in front], objectives)] if front else None,
        hypervolume=hypervolume([results[n].values for n in front], reference, objectives),
        noise=_noise(candidates, objectives),
        verifications=history.verifications,
        notes=history.notes,
        predicted=predicted,
    )


def front_of(rows: Sequence[Mapping[str, float]], objectives: Sequence[Objective]) -> list[int]:
    """Rows that no other row dominates, best first objective first. Every row has every objective."""
    return pareto.front(points(rows, objectives), directions(objectives))


def knee_of(rows: Sequence[Mapping[str, float]], objectives: Sequence[Objective]) -> int:
    """Row of the front where giving up a little of one objective stops buying much of another."""
    return pareto.knee(points(rows, objectives), directions(objectives))


def points(rows: Sequence[Mapping[str, float]], objectives: Sequence[Objective]) -> NDArray[np.float64]:
    """Return the objectives as an array of shape (rows, objectives)."""
    return np.array([[row[o.name] for o in objectives] for row in rows], dtype=np.float64).reshape(-1, len(objectives))


def directions(objectives: Sequence[Objective]) -> list[Direction]:
    """Which way is better, objective by objective."""
    return [o.direction for o in objectives]


def hypervolume(
    rows: Sequence[Mapping[str, float]], reference: TrialRecord | None, objectives: Sequence[Objective]
) -> float | None:
    """Hypervolume of these values in units of the reference's, up to `HYPERVOLUME_CORNER` times its values.

    Each objective is divided by the reference's value (or divides it, where more is better), so that the figure has no
    unit, does not depend on which other trials ran, and is exactly 1 for the reference alone.
    """
    if reference is None or reference.score is None:
        return None
    base = reference.score.values
    if any(not row.get(o.name, 0.0) > 0 for row in (base, *rows) for o in objectives):
        return None
    ratios = [
        [row[o.name] / base[o.name] if o.direction == "minimize" else base[o.name] / row[o.name] for o in objectives]
        for row in rows
    ]
    corner = [HYPERVOLUME_CORNER] * len(objectives)
    return pareto.hypervolume(ratios, corner, ["minimize"] * len(objectives))


def hypervolume_series(study: StudyView) -> list[tuple[TrialRecord, float]]:
    """Hypervolume after each trial that was scored, in order of their end, each trial with its own measurement."""
    rows: list[Mapping[str, float]] = []
    series: list[tuple[TrialRecord, float]] = []
    finished = [t for t in study.trials if t.finished_at is not None and t.predicted == study.predicted]
    for trial in sorted(finished, key=lambda t: t.finished_at or 0.0):
        if trial.score is None:
            continue
        if trial.number in study.results:
            rows.append(trial.score.values)
            rows = [rows[i] for i in front_of(rows, study.objectives)]
        volume = hypervolume(rows, study.reference, study.objectives)
        if volume is not None:
            series.append((trial, volume))
    return series


def changed_params(study: StudyView, trial: TrialRecord) -> dict[str, Any]:
    """Return the searched parameters of a trial whose values differ from those that the reference ran with."""
    first = study.reference or next((t for t in study.trials if t.source == "reference"), None)
    if first is None:
        return dict(trial.params)
    effective = first.engine.effective_args if first.engine else {}
    variables = {f"env.{name}": value for name, value in first.config.env.items()}
    base = {**effective, **first.config.args, **variables, **first.params}
    return {name: value for name, value in trial.params.items() if name not in base or base[name] != value}


def violations(trial: TrialRecord) -> Mapping[str, float]:
    """Constraint -> signed violation: measured, or that of memory from the evidence of an out-of-memory failure."""
    if trial.score is not None:
        return trial.score.violations
    if trial.failure is not None and trial.failure.kind.is_oom:
        return {"memory": memory_violation(trial.failure)}
    return {}


def front_document(study: StudyView) -> dict[str, Any]:
    """Return the document of `tuner front --json`; JSON values only, no NaN or infinity."""
    return {
        "study": study.study,
        "predicted": study.predicted,
        "objectives": [{"name": o.name, "unit": o.unit, "direction": o.direction} for o in study.objectives],
        "reference": trial_document(study, study.reference) if study.reference else None,
        "hypervolume": study.hypervolume,
        "noise": dict(study.noise),
        "same_within_noise": [list(pair) for pair in study.same_within_noise],
        "trials": [trial_document(study, trial) for trial in study.trials],
    }


def trial_document(study: StudyView, trial: TrialRecord) -> dict[str, Any]:
    """Return one trial of `tuner front --json`, without secrets."""
    failure = trial.failure
    document = {
        "number": trial.number,
        "state": trial.state.value,
        "source": trial.source,
        "repeats": trial.repeats,
        "predicted": trial.predicted,
        "params": dict(trial.params),
        "values": _finite(study.values(trial)),
        "intervals": {
            name: list(pair) for name, pair in study.intervals(trial).items() if all(map(math.isfinite, pair))
        },
        "violations": _finite(violations(trial)),
        "void": [reason.code for reason in trial.score.void] if trial.score else [],
        "pareto": trial.number in study.front,
        "knee": trial.number == study.knee,
        "verified": study.is_verified(trial.number),
        "verification": _verification_document(study.verification(trial.number)),
        "failure": {"kind": failure.kind.value, "stage": failure.stage.value, "message": failure.message}
        if failure
        else None,
    }
    masked: dict[str, Any] = mask_tree(document, secret_values() + secret_values(trial.config.env, trial.config.args))
    return masked


def _verification_document(verification: Verification | None) -> dict[str, Any] | None:
    if verification is None:
        return None
    return {
        "rounds": verification.rounds,
        "over_http": verification.over_http,
        "change": dict(verification.change),
        "interval": {name: list(ends) for name, ends in verification.interval.items()},
        "verdict": dict(verification.verdict),
    }


def _alone_where_known(candidates: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Leave out what was measured beside busy neighbours of configurations that were also measured alone."""
    alone = {t.config.key() for t in candidates if t.state is TrialState.COMPLETE and not t.neighbours}
    return [t for t in candidates if not t.neighbours or t.config.key() not in alone]


def _results(candidates: Iterable[TrialRecord], objectives: Sequence[Objective]) -> list[Result]:
    """One result a configuration that was feasible every time that it was tried."""
    groups = _by_configuration(candidates, (TrialState.COMPLETE, TrialState.INFEASIBLE))
    results = (_result(g) for g in groups if all(t.state is TrialState.COMPLETE for t in g))
    return [r for r in results if all(math.isfinite(r.values.get(o.name, math.nan)) for o in objectives)]


def _result(group: Sequence[TrialRecord]) -> Result:
    scores = [t.score for t in group if t.score is not None]
    names = set.intersection(*(set(s.values) for s in scores))
    bounded = set.intersection(*(set(s.intervals) for s in scores)) & names
    median = statistics.median
    return Result(
        number=min(t.number for t in group),
        values={n: median(s.values[n] for s in scores) for n in scores[0].values if n in names},
        intervals={
            n: (median(s.intervals[n][0] for s in scores), median(s.intervals[n][1] for s in scores))
            for n in scores[0].intervals
            if n in bounded
        },
        measurements=len(scores),
    )


def _by_configuration(trials: Iterable[TrialRecord], states: Sequence[TrialState]) -> list[list[TrialRecord]]:
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.state in states:
            groups.setdefault(trial.config.key(), []).append(trial)
    return list(groups.values())


def _noise(candidates: Iterable[TrialRecord], objectives: Sequence[Objective]) -> dict[str, float]:
    groups = _by_configuration(candidates, (TrialState.COMPLETE,))
    scores = [[t.score.values for t in group if t.score is not None] for group in groups]
    runs = max(scores, key=len, default=[])
    floors = noise_floor(runs) if len(runs) > 1 else {}
    return {o.name: floors[o.name] for o in objectives if o.name in floors}


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
