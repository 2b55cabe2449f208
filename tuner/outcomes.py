"""The record of a trial: as it begins, and from what an engine showed of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping

from objectives.measurement import Failure, FailureKind, Measurement, Stage
from objectives.memory import memory_violation
from objectives.score import Score, UserMetric
from objectives.validity import Reference
from tuner.config import EngineConfig
from tuner.gate import Admitted, NotAdmitted
from tuner.judge import judge
from tuner.ledger import TrialRecord, TrialState
from tuner.proposal import Proposal
from tuner.study_file import StudyFile
from tuner.workload.model import Workload


def begun(
    proposal: Proposal, verdict: Admitted | NotAdmitted, config: EngineConfig, space: Collection[str]
) -> TrialRecord:
    """Return the record of a trial that begins.

    Its parameters are those that are searched, with vLLM's own values where the trial sets none, and what it sets
    beyond them.
    """
    effective = verdict.effective_args if isinstance(verdict, Admitted) else {}
    values = {**{name: effective.get(name) for name in space}, **proposal.changes}
    return TrialRecord(
        number=proposal.number,
        state=TrialState.RUNNING,
        source=proposal.source,
        params=values,
        config=config,
        started_at=time.time(),
        repeats=proposal.repeats,
        effective_key=verdict.key if isinstance(verdict, Admitted) else None,
    )


def refused(record: TrialRecord, verdict: NotAdmitted) -> TrialRecord:
    """Return the record of a trial that the gate refused."""
    score = Score({}, {}, {"memory": verdict.violation} if verdict.failure.kind.is_oom else {})
    return _ended(record, TrialState.INFEASIBLE, failure=verdict.failure, score=score)


def failed(record: TrialRecord, failure: Failure) -> TrialRecord:
    """Return the record of a trial whose engine failed; the machine's fault is no result."""
    if failure.kind is FailureKind.DOMINATED:
        return _ended(record, TrialState.CENSORED, failure=failure)
    if not failure.kind.is_configuration_fault:
        return _ended(record, TrialState.FAILED, failure=failure)
    score = Score({}, {}, {"memory": memory_violation(failure)} if failure.kind.is_oom else {})
    return _ended(record, TrialState.INFEASIBLE, failure=failure, score=score)


def measured(
    record: TrialRecord,
    measurement: Measurement,
    file: StudyFile,
    workload: Workload,
    reference: Reference | None,
    metrics: Mapping[str, UserMetric],
) -> TrialRecord:
    """Return the record of a trial that was measured."""
    score = judge(file, measurement, workload, reference, metrics)
    state = TrialState.VOID if score.void else TrialState.COMPLETE if score.feasible else TrialState.INFEASIBLE
    return dataclasses.replace(
        _ended(record, state, score=score),
        engine=measurement.engine,
        speed_before=measurement.speed_before,
        speed_after=measurement.speed_after,
        predicted=measurement.predicted,
    )


def memory_model_was_right(verdict: Admitted, record: TrialRecord) -> bool | None:
    """Whether a start that the memory model would have refused proved it right; `None` where it proves nothing."""
    if verdict.predicted_failure is None:
        return None
    if record.failure is not None and record.failure.kind.is_oom:
        return True
    return False if record.engine is not None else None


def interrupted(record: TrialRecord) -> TrialRecord:
    """Return the record of a trial that runs while the tuner ends: it is run again under its number."""
    text = "the tuner was ended; the trial will be run again"
    return _ended(record, TrialState.FAILED, failure=Failure(FailureKind.INTERRUPTED, Stage.RUN, text))


def _ended(
    record: TrialRecord, state: TrialState, *, score: Score | None = None, failure: Failure | None = None
) -> TrialRecord:
    return dataclasses.replace(record, state=state, finished_at=time.time(), score=score, failure=failure)
