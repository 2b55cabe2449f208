"""A study before its night: which of its space fits, and its first trials predicted on the twin.

A predicted trial is the same `TrialRecord` as a measured one, so that front, table, importance and figures are those
of any study; it is marked as predicted and goes into no ledger.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objectives.measurement import Failure, Measurement
from objectives.score import UserMetric
from tuner import outcomes
from tuner.config import EngineConfig
from tuner.design import design_points
from tuner.engine.protocol import MeasurePlan, TrialEngine
from tuner.errors import EngineUnsupportedError
from tuner.gate import Admitted, Gate, NotAdmitted
from tuner.ledger import TrialRecord, TrialState
from tuner.study_file import StudyFile
from tuner.workload.model import Workload


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration to predict: who proposes it, and what it sets beyond the study's fixed arguments."""

    source: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SpaceShare:
    """How much of the space the gate would let through, on an even sample of it.

    Parameters
    ----------
    refused:
        Points that do not fit even at the favourable end of the memory model's interval, or that cannot hold the
        workload: refused without an engine.
    uncertain:
        Points that are let through and do not fit at the unfavourable end: an engine has to show it.
    reasons:
        Kind of failure -> refused points.
    """

    samples: int
    refused: int
    uncertain: int
    reasons: Mapping[str, int]

    @property
    def fits(self) -> float:
        """Share of the space that fits whatever end of the interval is true."""
        return 1.0 - (self.refused + self.uncertain) / self.samples

    @property
    def admitted(self) -> float:
        """Share of the space that the gate lets through."""
        return 1.0 - self.refused / self.samples


@dataclass(frozen=True, slots=True)
class Forecast:
    """One predicted trial.

    Parameters
    ----------
    workload_s:
        Predicted seconds of the workload, all repeats together; `None` where no engine would have run it.
    twin_s:
        What the prediction itself took.
    weights_gib:
        Weights over all devices of the engine; `None` where the gate refused.
    """

    record: TrialRecord
    workload_s: float | None
    twin_s: float
    weights_gib: float | None


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What could be predicted in the time that there was.

    Parameters
    ----------
    unpredictable:
        What the twin does not model -> how many configurations were left out for it.
    """

    trials: tuple[Forecast, ...]
    unpredictable: Mapping[str, int]


def share_of_space(file: StudyFile, gate: Gate, base: EngineConfig, samples: int) -> SpaceShare:
    """Ask the gate about the first points of the study's design."""
    verdicts = [gate.check(base.with_args(p)) for p in design_points(file.spec.space, samples, file.spec.search.seed)]
    refused = [v.failure.kind.value for v in verdicts if isinstance(v, NotAdmitted)]
    uncertain = sum(
        isinstance(v, Admitted) and v.memory is not None and v.memory.violation_interval[1] > 0 for v in verdicts
    )
    return SpaceShare(len(verdicts), len(refused), uncertain, dict(Counter(refused)))


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Predicts trials of one study."""

    file: StudyFile
    workload: Workload
    base: EngineConfig
    gate: Gate
    twin: TrialEngine
    user_metrics: Mapping[str, UserMetric]

    def forecast(self, candidates: Iterable[Candidate], limit_s: float) -> Forecasts:
        """Predict candidates in order, each configuration once, until they or the time is used up.

        The clock starts after the first prediction, which imports vLLM.
        """
        deadline: float | None = None
        trials: list[Forecast] = []
        unpredictable: Counter[str] = Counter()
        seen: set[str] = set()
        for candidate in candidates:
            if deadline is not None and time.monotonic() > deadline:
                break
            config = self.base.with_args(candidate.changes)
            if config.key() in seen:
                continue
            seen.add(config.key())
            try:
                trials.append(self._trial(len(trials), candidate, config))
            except EngineUnsupportedError as error:
                unpredictable[str(error)] += 1
            deadline = deadline or time.monotonic() + limit_s
        return Forecasts(tuple(trials), dict(unpredictable))

    def duration_s(self, config: EngineConfig, workload: Workload) -> float:
        """Predicted seconds of any workload on a configuration; 0 where it fails."""
        outcome = self.twin.run(config, workload, MeasurePlan(speed_probe=False), _silent)
        return sum(outcome.duration_s) if isinstance(outcome, Measurement) else 0.0

    def _trial(self, number: int, candidate: Candidate, config: EngineConfig) -> Forecast:
        began_s = time.monotonic()
        verdict = self.gate.check(config)
        record = TrialRecord(
            number=number,
            state=TrialState.RUNNING,
            source=candidate.source,
            params=dict(candidate.changes),
            config=config,
            started_at=float(number),
            predicted=True,
        )
        if isinstance(verdict, NotAdmitted):
            return Forecast(_dated(outcomes.refused(record, verdict)), None, 0.0, None)
        measure = self.file.spec.measure
        plan = MeasurePlan(measure.repeats, measure.speed_probe, run_budget_s=measure.run_budget_s)
        outcome = self.twin.run(config, self.workload, plan, _silent)
        devices = int(config.args.get("tensor_parallel_size") or 1)
        weights_gib = verdict.memory.weights_gib * devices if verdict.memory else None
        if isinstance(outcome, Failure):
            done, workload_s = _dated(outcomes.failed(record, outcome)), None
        else:
            done, workload_s = self._scored(record, outcome), sum(outcome.duration_s)
        return Forecast(done, workload_s, time.monotonic() - began_s, weights_gib)

    def _scored(self, record: TrialRecord, outcome: Measurement) -> TrialRecord:
        effective = outcome.engine.effective_args
        own = {name: effective[name] for name in self.file.spec.space if name in effective}
        whole = replace(record, params={**own, **record.params})
        return _dated(outcomes.measured(whole, outcome, self.file, self.workload, None, self.user_metrics))


def samples(file: StudyFile, count: int) -> Sequence[Candidate]:
    """Return the first points of the study's design as candidates."""
    return [Candidate("design", point) for point in design_points(file.spec.space, count, file.spec.search.seed)]


def _dated(record: TrialRecord) -> TrialRecord:
    """Return the record of a trial that took no time: its place in the order is its date."""
    return replace(record, finished_at=record.started_at)


def _silent(_: str) -> None:
    """Nobody listens to the stages of a prediction."""
