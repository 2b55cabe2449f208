"""The loop of a study: propose, gate, run, score, record, tell. The only module that knows all the others.

What happened is in the ledger before anything else hears of it; Optuna and MLflow are brought up to date from there.
A trial that was interrupted keeps its number and is run again, so that an interrupted study proposes what an
uninterrupted one would have.

Engines work on threads of their own (`tuner.crew`); everything here happens on one. Nothing runs beside the first
measurement of the reference, with which all others are compared.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from objectives.measurement import FailureKind, Measurement
from objectives.score import UserMetric
from objectives.validity import Reference
from tuner import artifacts, outcomes
from tuner.agenda import Agenda
from tuner.config import EngineConfig
from tuner.crew import ATTEMPTS, Crew, Ended, Job, Progressed
from tuner.drift import drift_note, interference_note
from tuner.engine.protocol import EnginePool, Seat
from tuner.errors import StudyStoppedError
from tuner.gate import Admitted, Gate, NotAdmitted
from tuner.interrupts import remembered
from tuner.ledger import Attempt, History, Ledger, StudyNote, TrialLine, TrialRecord, TrialState
from tuner.night import OPERATOR, Deadline, Step, is_open, next_step, outlook
from tuner.pace import Pace, saving
from tuner.probe import probes_alike
from tuner.proposal import Proposal, Standing
from tuner.proposer import Proposer
from tuner.run_plan import bars_of, limits_of, measure_plan
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.telling import tell
from tuner.view import Objective, view
from tuner.workload.model import Workload

INSISTS = 3
"""So many known or refused proposals in a row mean that the sampler is stuck: the next one is drawn at random."""
REFUSALS_IN_A_ROW = 200
"""So many proposals in a row that needed no engine mean that nothing is left to try."""
HELD_AT_MOST = 10
"""So many proposals may wait for what a running trial will show; then nothing new is asked for."""
LOOK_S = 2.0
"""How often it is looked for engines on machines that joined, while nothing else happens."""
NO_ENGINE_S = 600.0
"""So long a study waits for a machine when all have left."""


class Listener(Protocol):
    """Hears what a study does, to show it."""

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Hear that a trial begins, how many trials there will be, and when the study is expected to end."""
        ...

    def progressed(self, number: int, text: str) -> None:
        """Hear that a running trial entered a new stage."""
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
    pool: EnginePool
    listener: Listener
    after_trial: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a study came to its end."""

    code: str
    text: str


class StudyRun:
    """One `tuner run`."""

    def __init__(self, rooms: Rooms, *, trials: int | None, deadline: Deadline | None) -> None:
        self._rooms = rooms
        self._limits = limits_of(rooms.file, trials)
        self._deadline = deadline
        self._ledger: Ledger = rooms.folder.ledger
        self._history = self._ledger.history()
        self._crew = Crew(rooms.pool, rooms.workload)
        self._agenda = Agenda(rooms.proposer, rooms.base, rooms.file.spec.noise, rooms.objectives)
        self._waiting: list[Job] = []
        self._held: dict[int, int] = {}
        """Proposals that wait for what a running trial will show -> that trial."""
        self._refusals = 0
        self._without_engines_since_s: float | None = None
        self._keys: dict[str, TrialRecord] = {}
        self._reference: tuple[EngineConfig, Reference] | None = None
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
        try:
            with remembered() as stop_if_asked:
                step = self._drive(stop_if_asked)
        except (KeyboardInterrupt, StudyStoppedError):
            for job in self._jobs():
                if job.seat is not None:
                    self._ledger.append(TrialLine(outcomes.interrupted(job.record)))
            self._rooms.pool.close()  # now, not after MLflow has been waited for
            raise
        ending = Ending(step.code, step.text)
        if self._refusals >= REFUSALS_IN_A_ROW:
            text = f"the last {REFUSALS_IN_A_ROW} proposals were known or refused: nothing is left to try"
            ending = Ending("exhausted", text)
        elif step.code == "budget" and (end := self._rooms.proposer.standing().end) is not None:
            ending = Ending(end.code, end.text)
        if saved := saving(self._history):
            self._note("compile_cache", saved.sentence)
        self._note(ending.code, ending.text)
        return ending

    def _drive(self, stop_if_asked: Callable[[], None]) -> Step:
        """Keep every engine busy until nothing more is to be begun and everything has ended; return why."""
        while True:
            stop_if_asked()
            self._launch_waiting()
            if self._crew.has_place(self._waiting) and not self._reference_is_under_way():
                standing = self._rooms.proposer.standing()
                step = self._step(standing)
                if (proposal := self._next(step, standing)) is not None:
                    self._begin(proposal)
                    continue
                if step.kind == "stop" and not self._jobs():
                    return step
            self._hear()

    def _next(self, step: Step, standing: Standing) -> Proposal | None:
        """Return what is to be begun now; `None` where that hangs on what is under way, or nothing is."""
        interrupted = self._interrupted(standing)
        if step.kind == "stop":
            return None if self._jobs() else self._agenda.last(self._history, self._has_time_for)
        if len(self._held) >= HELD_AT_MOST:
            return None
        if step.repeats is not None and not interrupted:
            return self._agenda.repeat(self._history, "confirm", step.repeats)
        return self._agenda.next(
            self._history,
            self._under_way(),
            interrupted,
            has_queued=bool(standing.queued),
            explore=self._refusals + len(self._held) >= INSISTS,
            has_neighbours=self._crew.has_neighbours,
        )

    def _jobs(self) -> list[Job]:
        """Trials under way: those that run, and those that wait for a seat."""
        return [*self._crew.running, *self._waiting]

    def _under_way(self) -> list[TrialRecord]:
        return [job.record for job in self._jobs()]

    def _interrupted(self, standing: Standing) -> list[Proposal]:
        """Trials that were begun and are neither over nor busy now."""
        busy = {record.number for record in self._under_way()} | self._held.keys()
        return [p for p in standing.open if p.number not in busy]

    def _reference_is_under_way(self) -> bool:
        return any(job.proposal.source == "reference" for job in self._jobs())

    def _hear(self) -> None:
        """Wait for what the engines have to say."""
        event = self._crew.hear(LOOK_S)
        if isinstance(event, Progressed):
            self._rooms.listener.progressed(event.job.record.number, event.text)
        elif isinstance(event, Ended):
            self._attempted(event)
        if self._crew.running or self._crew.seats:
            self._without_engines_since_s = None
        elif self._without_engines_since_s is None:
            self._without_engines_since_s = time.monotonic()
        elif time.monotonic() - self._without_engines_since_s > NO_ENGINE_S:
            text = f"no machine with room for an engine has been there for {NO_ENGINE_S:.0f} s; add one and go on"
            self._note("machine", text)
            raise StudyStoppedError(text)

    # What comes next ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Tell Optuna what the ledger knows and it does not, and queue recipes again that failed."""
        proposer = self._rooms.proposer
        proposer.close_unnamed()
        finished = {t.number: t for t in self._history.finished if not is_open(t)}
        for proposal in proposer.open_trials():
            if proposal.number in finished:
                self._tell(proposal, finished[proposal.number])
        recipes = {t.source: t for t in finished.values() if t.source.startswith("recipe:")}
        for record in recipes.values():
            if record.state is TrialState.FAILED:
                proposer.enqueue_again(record.number)

    def _has_time_for(self, record: TrialRecord) -> bool:
        left_s = self._left_s()
        return left_s is None or left_s >= Pace.of(self._history, self._limits.first_guess_s).again_s(record)

    def _step(self, standing: Standing) -> Step:
        is_open = bool(self._interrupted(standing)) or OPERATOR in standing.queued
        is_through = self._refusals >= REFUSALS_IN_A_ROW or standing.end is not None
        front, runners_up = self._front()
        return next_step(
            self._history,
            front,
            self._limits,
            self._left_s(),
            runners_up=runners_up,
            is_open=is_open,
            searched_all=is_through and not is_open and not standing.queued,
            under_way=self._under_way(),
        )

    def _front(self) -> tuple[tuple[int, ...], int]:
        """Return the members that are to be measured again, and how many others may join them then."""
        if not self._limits.rounds:
            return (), 0
        seen = view(self._history, self._rooms.objectives)
        return seen.front, len(seen.runners_up)

    def _left_s(self) -> float | None:
        return None if self._deadline is None else self._deadline.left_s()

    def _has_time(self) -> bool:
        """Whether another try of a trial would end before the deadline."""
        left_s = self._left_s()
        return left_s is None or left_s >= Pace.of(self._history, self._limits.first_guess_s).trial_s

    def _ends_at(self) -> float | None:
        """When the study is expected to end, in Unix seconds."""
        if not any(t.engine is not None for t in self._history.finished) and self._deadline is None:
            return None  # how long a trial takes is a guess yet
        limits = dataclasses.replace(self._limits, engines=max(1, len(self._crew.seats)))
        front, runners_up = self._front()
        ends_in_s = outlook(self._history, front, limits, self._left_s(), runners_up=runners_up).ends_in_s
        return None if ends_in_s is None else time.time() + ends_in_s

    # One trial ------------------------------------------------------------------------------------------------------

    def _begin(self, proposal: Proposal) -> None:
        """Begin one proposal, unless its result is known, refused or about to be."""
        config = self._rooms.base.with_args(proposal.changes)
        verdict = self._rooms.gate.check(config)
        if (known := self._known(proposal, verdict)) is not None:
            self._tell(proposal, known)
            self._refusals += 1
            return
        if (running := self._will_be_known(proposal, verdict)) is not None:
            self._held[proposal.number] = running
            return
        record = outcomes.begun(proposal, verdict, config, self._rooms.file.spec.space)
        if isinstance(verdict, NotAdmitted):
            self._refusals += 1
            self._finish(proposal, outcomes.refused(record, verdict))
            return
        self._refusals = 0
        alone = self._agenda.wants_quiet(self._history, self._under_way(), proposal)
        self._waiting.append(Job(proposal, verdict, record, alone=alone))

    def _known(self, proposal: Proposal, verdict: Admitted | NotAdmitted) -> TrialRecord | None:
        """Find the trial that already showed what this proposal would; what is measured again on purpose has none."""
        if isinstance(verdict, NotAdmitted) or proposal.repeats is not None or proposal.source == "reference":
            return None
        return self._keys.get(verdict.key)

    def _will_be_known(self, proposal: Proposal, verdict: Admitted | NotAdmitted) -> int | None:
        """Find the trial under way that will show what this proposal would, or whether the memory model is right."""
        if isinstance(verdict, NotAdmitted) or proposal.repeats is not None:
            return None
        for job in self._jobs():
            if job.verdict.key == verdict.key and job.proposal.repeats is None:
                return job.record.number
            if verdict.predicted_failure is not None and job.verdict.predicted_failure is not None:
                return job.record.number
        return None

    def _launch_waiting(self) -> None:
        """Give every trial that waits a seat, as far as there are some."""
        for job in list(self._waiting):
            if (seat := self._crew.place_for(job)) is not None:
                self._waiting.remove(job)
                self._launch(job, seat)

    def _launch(self, job: Job, seat: Seat) -> None:
        if job.seat is None:
            job.record = dataclasses.replace(job.record, started_at=time.time())
            self._write(TrialLine(job.record))
            self._rooms.listener.began(job.proposal, self._limits.trials, self._ends_at())
        number = job.record.number
        log_path = self._rooms.folder.trial(number) / "engine.log"
        plan = measure_plan(self._rooms.file.spec.measure, number * ATTEMPTS + job.measurements, log_path)
        if job.proposal.repeats is None and job.proposal.source != "reference":
            bars = bars_of(self._history, self._rooms.objectives, self._rooms.file.spec.search)
            plan = dataclasses.replace(plan, bars=bars)
        if (left_s := self._left_s()) is not None:
            plan = dataclasses.replace(plan, end_by_s=time.monotonic() + left_s)
        self._crew.launch(job, seat, plan)

    def _attempted(self, ended: Ended) -> None:
        """Take in how an attempt ended: it is tried once more if the machine failed or the measurement is void."""
        job, outcome = ended.job, ended.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        self._crew.release(job)
        job.engine_s += ended.seconds
        if isinstance(outcome, Measurement):
            # Its tables are on disk before its record is.
            artifacts.save(outcome, self._rooms.folder.trial(job.record.number))
            rooms, reference = self._rooms, self._reference_for(job)
            finished = outcomes.measured(job.record, outcome, rooms.file, rooms.workload, reference, rooms.user_metrics)
        else:
            finished = outcomes.failed(job.record, outcome)
        finished = dataclasses.replace(
            finished, attempts=tuple(job.attempts), engine_s=job.engine_s, neighbours=job.neighbours
        )
        self._count_machine_failure(job, finished)
        if self._is_tried_again(job, finished):
            void = tuple(reason.code for reason in finished.score.void) if finished.score else ()
            job.attempts.append(Attempt(finished.failure, void, ended.seconds))
            self._waiting.insert(0, job)
            return
        self._held = {held: by for held, by in self._held.items() if by != job.record.number}
        self._finish(job.proposal, finished)
        self._stop_if_worn_out(finished)
        self._learn_about_gate(job.verdict, finished)
        if job.proposal.source == "sentinel":
            self._watch_machine()

    def _is_tried_again(self, job: Job, record: TrialRecord) -> bool:
        if record.state not in (TrialState.VOID, TrialState.FAILED) or is_open(record):
            return False
        return job.may_try_again(record.failure) and not self._crew.is_worn_out and self._has_time()

    def _count_machine_failure(self, job: Job, record: TrialRecord) -> None:
        """Hold a failure of the machine against the seat; a machine that left took only its trial with it."""
        if is_open(record) or job.seat is None:
            return
        if record.failure is not None and record.failure.kind is FailureKind.NODE_LOST:
            self._note("node_lost", f"trial {record.number} ended with {job.seat.machine}: {record.failure.message}")
            return
        retired = self._crew.count(job.seat, failed=record.state is TrialState.FAILED)
        if retired and record.failure is not None and not self._crew.is_worn_out:
            why = f"{record.failure.kind} ({record.failure.message})"
            self._note("engine", f"an engine on {job.seat.machine} is not used any more, its machine failed it: {why}")

    def _stop_if_worn_out(self, record: TrialRecord) -> None:
        if not self._crew.is_worn_out:
            return
        assert record.failure is not None
        text = (
            f"the machine failed {self._crew.failures_in_a_row} times in a row, last with {record.failure.kind} "
            f"({record.failure.message}); mend it and run the study again"
        )
        self._note("machine", text)
        raise StudyStoppedError(text)

    def _finish(self, proposal: Proposal, record: TrialRecord) -> None:
        """Write the record down, then tell everybody."""
        self._write(TrialLine(record))
        self._remember(record)
        if not is_open(record):  # the deadline came: it keeps its number and is run again
            self._tell(proposal, record)
        self._rooms.after_trial()
        self._rooms.listener.finished(record, self._history)

    def _remember(self, record: TrialRecord) -> None:
        """Know a configuration, so that it is not run again; failures of the machine say nothing about it."""
        if record.state is TrialState.FAILED or record.repeats is not None:
            return
        key = record.effective_key
        if key is not None and (key not in self._keys or self._keys[key].state is TrialState.VOID):
            self._keys[key] = record
        # The first valid measurement, nearly always the reference's; vLLM's defaults may not fit, or be void each time.
        if self._reference is None and record.engine is not None and record.state is not TrialState.VOID:
            measured = artifacts.load(self._rooms.folder.trial(record.number))
            self._reference = (record.config, Reference.of(measured))

    def _reference_for(self, job: Job) -> Reference | None:
        """Return what a trial is held against; with a probe only where the machine alone makes probes differ."""
        if self._reference is None:
            return None
        config, reference = self._reference
        return reference if probes_alike(config, job.record.config) else dataclasses.replace(reference, probe=None)

    def _tell(self, proposal: Proposal, record: TrialRecord) -> None:
        tell(self._rooms.proposer, self._rooms.objectives, proposal, record)

    def _learn_about_gate(self, verdict: Admitted, record: TrialRecord) -> None:
        """Compare a start with what the memory model said would not fit."""
        right = outcomes.memory_model_was_right(verdict, record)
        if right is None:
            return
        self._rooms.gate.proven(right=right)
        ran = "ran out of memory as predicted: the like is refused from now on"
        started = "started although the memory model said no: it refuses nothing any more"
        self._note("gate", f"trial {record.number} {ran if right else started}")

    def _watch_machine(self) -> None:
        """Say so when the reference shows that the machine drifts, or that engines beside each other disturb."""
        names, runs = [o.name for o in self._rooms.objectives], self._rooms.file.spec.noise.aa_runs
        for look in (drift_note, interference_note):
            if (note := look(self._history, names, runs, time.time())) is not None:
                self._write(note)
                self._rooms.listener.noted(note.text)

    def _note(self, code: str, text: str) -> None:
        self._write(StudyNote(code, text, time.time()))
        self._rooms.listener.noted(text)

    def _write(self, line: TrialLine | StudyNote) -> None:
        self._ledger.append(line)
        self._history = self._history.after(line)
