"""The loop of a study: propose, gate, run, score, record, tell. The only module that knows all the others.

What happened is in the ledger before anything else hears of it; Optuna and MLflow are brought up to date from there.
A trial that was interrupted keeps its number and is run again, so that an interrupted study proposes what an
uninterrupted one would have.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from objectives.measurement import Failure, FailureKind, Measurement, Stage
from objectives.memory import memory_violation
from objectives.score import Score, UserMetric
from objectives.speed import drifts, noise_floor
from objectives.validity import Reference
from tuner import artifacts
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan, TrialEngine
from tuner.errors import StudyStoppedError
from tuner.gate import Admitted, Gate, NotAdmitted
from tuner.judge import judge
from tuner.ledger import Attempt, History, Ledger, StudyNote, TrialLine, TrialRecord, TrialState
from tuner.pace import FIRST_GUESS_S, TWIN_GUESS_S, Pace
from tuner.proposer import Proposal, Proposer
from tuner.spec import Measure
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.view import Objective, view
from tuner.workload.model import Workload

MACHINE_FAILURES_IN_A_ROW = 3
"""So many failures of the machine without one success between them stop the study: it would only fail on."""
ATTEMPTS = 2
"""A void or machine-failed trial is tried once more."""
REFERENCE_TRIALS = 3
"""So many trials of one run may go into the reference, with which everything is compared, before it is done without."""
INSISTS = 3
"""So many known or refused proposals in a row mean that the sampler is stuck: the next one is drawn at random."""
REFUSALS_IN_A_ROW = 200
"""So many proposals in a row that needed no engine mean that nothing is left to try."""
NOT_A_CANDIDATE = frozenset({"sentinel", "confirm"})
"""Sources of trials that measure a known configuration again; they do not use up the budget of trials."""


class Listener(Protocol):
    """Hears what a study does, to show it."""

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Hear that a trial begins, how many trials there will be, and when the study is expected to end."""
        ...

    def progressed(self, text: str) -> None:
        """Hear that the trial that runs entered a new stage."""
        ...

    def finished(self, record: TrialRecord, history: History) -> None:
        """Hear that a trial is over."""
        ...

    def noted(self, text: str) -> None:
        """Hear something about the study as a whole."""
        ...


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that the loop works with, made by `tuner.opening`."""

    file: StudyFile
    folder: StudyFolder
    workload: Workload
    base: EngineConfig
    objectives: tuple[Objective, ...]
    user_metrics: Mapping[str, UserMetric]
    proposer: Proposer
    gate: Gate
    engine: TrialEngine
    listener: Listener
    after_trial: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a study came to its end."""

    code: str
    text: str


class StudyRun:
    """One `tuner run`."""

    def __init__(self, rooms: Rooms, *, trials: int | None, deadline: float | None) -> None:
        self._rooms = rooms
        self._trials = trials
        self._deadline = deadline
        self._ledger: Ledger = rooms.folder.ledger
        self._history = self._ledger.history()
        self._machine_failures = 0
        self._keys: dict[str, TrialRecord] = {}
        self._reference: Reference | None = None
        self._reference_trials = 1
        for record in self._history.finished:
            self._remember(record)

    def run(self) -> Ending:
        """Run trials until there is a reason to end.

        Raises
        ------
        StudyStoppedError
            When the machine fails again and again; what was finished is kept.
        """
        self._catch_up()
        refusals = 0
        while (ending := self._ending()) is None:
            proposal = self._next(explore=refusals >= INSISTS)
            ran = self._trial(proposal)
            refusals = 0 if ran else refusals + 1
            if refusals >= REFUSALS_IN_A_ROW:
                ending = Ending(
                    "exhausted", f"the last {refusals} proposals were known or refused: nothing is left to try"
                )
                break
        self._confirm()
        self._note(ending.code, ending.text)
        return ending

    def _confirm(self) -> None:
        """Measure the front again, so that the luck of a winner does not decide; as far as time allows."""
        for round_number in range(self._rooms.file.spec.confirm.rounds):
            for number in view(self._history, self._rooms.objectives).front:
                done = sum(t.source == "confirm" and t.repeats == number for t in self._history.finished)
                if done > round_number or not self._has_time():
                    continue
                record = next(t for t in self._history.trials if t.number == number)
                self._rooms.proposer.enqueue_repeat("confirm", self._changes(record), number)
                self._trial(self._next())

    # What comes next ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Tell Optuna what the ledger knows and it does not, and queue again what an operator asked for and lost."""
        proposer = self._rooms.proposer
        proposer.close_unnamed()
        finished = {t.number: t for t in self._history.finished if not _is_open(t)}
        for proposal in proposer.open_trials():
            if proposal.number in finished:
                self._tell(proposal, finished[proposal.number])
        recipes = {t.source: t for t in finished.values() if t.source.startswith("recipe:")}
        for record in recipes.values():
            if record.state is TrialState.FAILED:
                proposer.enqueue_again(record.number)

    def _next(self, *, explore: bool = False) -> Proposal:
        open_trials = self._rooms.proposer.open_trials()
        if open_trials:
            return open_trials[0]
        if not self._rooms.proposer.has_queued():
            self._queue_reference_again()
            self._queue_sentinel()
        return self._rooms.proposer.ask(explore=explore)

    def _queue_reference_again(self) -> None:
        """Queue the reference once more where the machine failed it or its measurement is void."""
        reference = self._history.reference
        if reference is None or reference.state not in (TrialState.FAILED, TrialState.VOID):
            return
        if self._reference_trials < REFERENCE_TRIALS:
            self._reference_trials += 1
            self._rooms.proposer.enqueue_again(reference.number)

    def _queue_sentinel(self) -> None:
        """Queue a further measurement of the reference: first for the noise floor, later to see the machine drift."""
        noise, reference = self._rooms.file.spec.noise, self._history.reference
        if reference is None or reference.state is not TrialState.COMPLETE:
            return
        repeats = [t for t in self._history.finished if t.source == "sentinel"]
        since = _candidates_since(self._history, repeats[-1].number if repeats else reference.number)
        if len(repeats) < noise.aa_runs or (noise.sentinel_every and since >= noise.sentinel_every):
            self._rooms.proposer.enqueue_repeat("sentinel", self._changes(reference), reference.number)

    def _changes(self, record: TrialRecord) -> dict[str, object]:
        """What a trial sets beyond the study's fixed arguments."""
        return {name: mine for name, (mine, _) in record.config.difference(self._rooms.base).items()}

    def _ending(self) -> Ending | None:
        done = candidates(self._history)
        if self._trials is not None and done >= self._trials and not self._rooms.proposer.open_trials():
            return Ending("budget", f"{done} of {self._trials} trials are done")
        if self._deadline is not None and not self._has_time():
            left = max(0.0, self._deadline - time.time())
            return Ending("deadline", f"a trial takes about {self._pace().trial_s:.0f} s, {left:.0f} s are left")
        return None

    def _has_time(self) -> bool:
        """Whether another trial would end before the deadline."""
        return self._deadline is None or time.time() + self._pace().trial_s <= self._deadline

    def _pace(self) -> Pace:
        is_twin = self._rooms.file.spec.engine.backend == "twin"
        return Pace.of(self._history, TWIN_GUESS_S if is_twin else FIRST_GUESS_S)

    def _ends_at(self) -> float | None:
        """When the study is expected to end, in Unix seconds."""
        pace = self._pace()
        by_trials = None
        if self._trials is not None:
            by_trials = time.time() + pace.trial_s * max(0, self._trials - candidates(self._history))
        known = [t for t in (by_trials, self._deadline) if t is not None]
        return min(known) if known else None

    # One trial ------------------------------------------------------------------------------------------------------

    def _trial(self, proposal: Proposal) -> bool:
        """Run one proposal to its record; return whether an engine was needed."""
        config = self._rooms.base.with_args(proposal.changes)
        verdict = self._rooms.gate.check(config)
        if (known := self._known(proposal, verdict)) is not None:
            self._tell(proposal, known)
            return False
        record = TrialRecord(
            number=proposal.number,
            state=TrialState.RUNNING,
            source=proposal.source,
            params=self._params(proposal, verdict),
            config=config,
            started_at=time.time(),
            repeats=proposal.repeats,
            effective_key=verdict.key if isinstance(verdict, Admitted) else None,
        )
        if isinstance(verdict, NotAdmitted):
            self._finish(proposal, self._refused(record, verdict))
            return False
        self._ledger.append(TrialLine(record))
        self._history = self._ledger.history()
        self._rooms.listener.began(proposal, self._trials, self._ends_at())
        try:
            finished = self._attempts(record)
        except KeyboardInterrupt:
            interrupted = Failure(
                FailureKind.INTERRUPTED, Stage.RUN, "the tuner was ended; the trial will be run again"
            )
            self._ledger.append(TrialLine(_ended(record, TrialState.FAILED, failure=interrupted)))
            raise
        self._finish(proposal, finished)
        self._learn_about_gate(verdict, finished)
        if proposal.source == "sentinel":
            self._watch_drift()
        return True

    def _known(self, proposal: Proposal, verdict: Admitted | NotAdmitted) -> TrialRecord | None:
        """Find the trial that already showed what this proposal would; what is measured again on purpose has none."""
        if isinstance(verdict, NotAdmitted) or proposal.repeats is not None or proposal.source == "reference":
            return None
        return self._keys.get(verdict.key)

    def _params(self, proposal: Proposal, verdict: Admitted | NotAdmitted) -> dict[str, object]:
        """Values of the searched parameters, vLLM's own for those that the trial does not set."""
        effective = verdict.effective_args if isinstance(verdict, Admitted) else {}
        values = {**{n: effective.get(n) for n in self._rooms.file.spec.space}, **proposal.changes}
        return {n: v for n, v in values.items() if n in self._rooms.file.spec.space or n in proposal.changes}

    def _refused(self, record: TrialRecord, verdict: NotAdmitted) -> TrialRecord:
        score = Score({}, {}, {"memory": verdict.violation} if verdict.failure.kind.is_oom else {})
        return _ended(record, TrialState.INFEASIBLE, failure=verdict.failure, score=score)

    def _attempts(self, record: TrialRecord) -> TrialRecord:
        """Try a trial, once more if the machine failed or the measurement is void."""
        attempts: list[Attempt] = []
        engine_s = 0.0
        for attempt in range(ATTEMPTS):
            log_path = self._rooms.folder.trial(record.number) / "engine.log"
            plan = measure_plan(self._rooms.file.spec.measure, record.number * ATTEMPTS + attempt, log_path)
            began_s = time.monotonic()
            outcome = self._rooms.engine.run(record.config, self._rooms.workload, plan, self._rooms.listener.progressed)
            seconds = time.monotonic() - began_s
            engine_s += seconds
            finished = self._scored(record, outcome)
            finished = dataclasses.replace(finished, attempts=tuple(attempts), engine_s=engine_s)
            self._count_machine_failures(finished)
            if finished.state not in (TrialState.VOID, TrialState.FAILED):
                return finished
            void = tuple(reason.code for reason in finished.score.void) if finished.score else ()
            attempts.append(Attempt(finished.failure, void, seconds))
            if self._machine_failures >= MACHINE_FAILURES_IN_A_ROW:
                return finished
        return finished

    def _scored(self, record: TrialRecord, outcome: Measurement | Failure) -> TrialRecord:
        """Turn what an engine showed into a finished record; its tables are on disk before it is."""
        if isinstance(outcome, Failure):
            if not outcome.kind.is_configuration_fault:
                return _ended(record, TrialState.FAILED, failure=outcome)
            score = Score({}, {}, {"memory": memory_violation(outcome)} if outcome.kind.is_oom else {})
            return _ended(record, TrialState.INFEASIBLE, failure=outcome, score=score)
        artifacts.save(outcome, self._rooms.folder.trial(record.number))
        rooms = self._rooms
        score = judge(rooms.file, outcome, rooms.workload, self._reference, rooms.user_metrics)
        state = TrialState.VOID if score.void else TrialState.COMPLETE if score.feasible else TrialState.INFEASIBLE
        return dataclasses.replace(
            _ended(record, state, score=score),
            engine=outcome.engine,
            speed_before=outcome.speed_before,
            speed_after=outcome.speed_after,
            predicted=outcome.predicted,
        )

    def _count_machine_failures(self, record: TrialRecord) -> None:
        self._machine_failures = self._machine_failures + 1 if record.state is TrialState.FAILED else 0

    def _finish(self, proposal: Proposal, record: TrialRecord) -> None:
        """Write the record down, then tell everybody."""
        self._ledger.append(TrialLine(record))
        self._history = self._ledger.history()
        self._remember(record)
        self._tell(proposal, record)
        self._rooms.after_trial()
        self._rooms.listener.finished(record, self._history)
        if self._machine_failures >= MACHINE_FAILURES_IN_A_ROW:
            assert record.failure is not None
            text = (
                f"the machine failed {self._machine_failures} times in a row, last with {record.failure.kind} "
                f"({record.failure.message}); mend it and run the study again"
            )
            self._note("machine", text)
            raise StudyStoppedError(text)

    def _remember(self, record: TrialRecord) -> None:
        """Know a configuration, so that it is not run again; failures of the machine say nothing about it."""
        if record.state is TrialState.FAILED or record.repeats is not None:
            return
        key = record.effective_key
        if key is not None and (key not in self._keys or self._keys[key].state is TrialState.VOID):
            self._keys[key] = record
        is_reference = record.source == "reference" and record.engine is not None
        if self._reference is None and is_reference and record.state is not TrialState.VOID:
            self._reference = Reference.of(artifacts.load(self._rooms.folder.trial(record.number)))

    def _tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """Tell Optuna. Predicted and measured alike; what the machine did wrong is never held against anything."""
        proposer = self._rooms.proposer
        score = record.score
        if record.state in (TrialState.FAILED, TrialState.VOID) or score is None or proposal.repeats is not None:
            proposer.tell_unusable(proposal.number)
        elif record.engine is None:
            proposer.tell_violation(proposal.number, score.violations.get("memory", 1.0))
        else:
            values = [score.values[o.name] for o in self._rooms.objectives]
            proposer.tell_measured(proposal.number, values, score.violations)

    def _learn_about_gate(self, verdict: Admitted | NotAdmitted, record: TrialRecord) -> None:
        """Compare a start with what the memory model said would not fit."""
        if not isinstance(verdict, Admitted) or verdict.predicted_failure is None:
            return
        if record.failure is not None and record.failure.kind.is_oom:
            self._rooms.gate.proven(right=True)
            self._note("gate", f"trial {record.number} ran out of memory as predicted: the like is refused from now on")
        elif record.engine is not None:
            self._rooms.gate.proven(right=False)
            self._note(
                "gate", f"trial {record.number} started although the memory model said no: it refuses nothing any more"
            )

    def _watch_drift(self) -> None:
        """Compare the latest measurement of the reference with the first: beyond the floor, the machine drifted."""
        measured = [t for t in self._history.finished if t.source in ("reference", "sentinel") and t.score is not None]
        series = [t for t in measured if t.state is TrialState.COMPLETE]
        runs = 1 + self._rooms.file.spec.noise.aa_runs
        if runs < 2 or len(series) <= runs:
            return
        values = [t.score.values for t in series if t.score is not None]
        floors = noise_floor(values[:runs])
        names = [o.name for o in self._rooms.objectives]
        for drift in drifts(values, {name: floors[name] for name in names if name in floors}):
            if drift.index == len(series) - 1:
                since, until = series[-2].number, series[-1].number
                self._note(
                    "drift",
                    f"trial {until} measured the reference again: {drift.metric} changed by "
                    f"{drift.relative_change:+.0%} since the study began, more than the noise floor of "
                    f"{drift.floor:.0%}; trials after {since} are in doubt",
                    {"since": since, "until": until},
                )

    def _note(self, code: str, text: str, values: Mapping[str, float] | None = None) -> None:
        self._ledger.append(StudyNote(code, text, time.time(), values or {}))
        self._history = self._ledger.history()
        self._rooms.listener.noted(text)


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


def candidates(history: History) -> int:
    """Count the trials that used up budget: an engine ran (or refused to start with) a configuration of their own."""
    return sum(
        t.engine_s > 0 and t.source not in NOT_A_CANDIDATE and not _is_open(t) and t.state is not TrialState.FAILED
        for t in history.finished
    )


def _candidates_since(history: History, number: int) -> int:
    return sum(t.engine_s > 0 and t.number > number and t.source not in NOT_A_CANDIDATE for t in history.finished)


def _is_open(record: TrialRecord) -> bool:
    """Whether a trial was interrupted and will be run again under its number."""
    return record.failure is not None and record.failure.kind is FailureKind.INTERRUPTED


def _ended(
    record: TrialRecord, state: TrialState, *, score: Score | None = None, failure: Failure | None = None
) -> TrialRecord:
    return dataclasses.replace(record, state=state, finished_at=time.time(), score=score, failure=failure)
