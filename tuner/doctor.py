"""Is everything of a study as it must be? Checked from what lies on disk; what can be mended is.

Ledger, Optuna, MLflow and the trials' tables are held against each other, and against the processes and shared memory
that a killed run may have left. A study that runs is only looked at: its driver mends what it needs itself.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from tuner import artifacts
from tuner.errors import StoreError, StudyBusyError
from tuner.judge import objectives_of
from tuner.ledger import History, StudyNote, TrialLine, TrialRecord, TrialState
from tuner.night import is_open
from tuner.outcomes import interrupted
from tuner.proposer import Proposer
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.telling import tell
from tuner.view import StudyView, view

Level = Literal["mended", "broken", "advice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was not as it must be.

    Parameters
    ----------
    check:
        Which check found it.
    level:
        `mended`: it is as it must be now. `broken`: it cannot be mended. `advice`: nothing is wrong, something is worth
        knowing.
    """

    check: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, over all checks."""

    study: str
    running: bool
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken now."""
        return all(finding.level != "broken" for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "study": self.study,
            "running": self.running,
            "healthy": self.healthy,
            "checks": list(self.checks),
            "findings": [{"check": f.check, "level": f.level, "text": f.text} for f in self.findings],
        }

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        running = "; it runs, and was only looked at" if self.running else ""
        verdict = "healthy" if self.healthy else "something cannot be mended"
        lines = [f"{f.level}: {f.check}: {f.text}" for f in self.findings]
        return [*lines, f"{self.study}: {verdict} ({len(self.checks)} checks, {len(self.findings)} findings){running}"]


@dataclass(frozen=True, slots=True)
class Patient:
    """One study, held by this process unless it runs."""

    file: StudyFile
    folder: StudyFolder
    running: bool

    def history(self) -> History:
        """What the ledger says now."""
        return self.folder.ledger.history()

    def view(self) -> StudyView:
        """The study as its readers see it now."""
        return view(self.history(), objectives_of(self.file))


def examine(file: StudyFile) -> Examination:
    """Check a study and mend what can be mended.

    Raises
    ------
    StoreError
        When its folder cannot be read at all.
    """
    folder = StudyFolder.of(file.spec.study)
    hold = folder.locked() if (folder.path / "lock").exists() else nullcontext()
    try:
        with hold:
            return _examined(Patient(file, folder, running=False))
    except StudyBusyError:
        return _examined(Patient(file, folder, running=True))


def _examined(patient: Patient) -> Examination:
    findings: list[Finding] = []
    done: list[str] = []
    for name, check in CHECKS.items():
        try:
            findings += [Finding(name, level, text) for level, text in check(patient)]
        except StoreError as error:
            findings.append(Finding(name, "broken", str(error)))
        done.append(name)
        if name == "ledger" and any(f.level == "broken" for f in findings):
            break  # nothing can be held against a ledger that cannot be read
    return Examination(patient.file.spec.study, patient.running, tuple(done), tuple(findings))


Found = Iterator[tuple[Level, str]]


def _ledger(patient: Patient) -> Found:
    """The ledger's last line is whole, and no trial was finished twice."""
    ledger = patient.folder.ledger
    if not patient.running:
        try:
            cut = ledger.cut_torn_line()
        except OSError as error:
            raise StoreError(f"{ledger.path}: the ledger cannot be mended ({error.strerror})") from error
        if cut:
            yield "mended", f"{cut} bytes of a line that a crash cut off were removed; the trial will be run again"
    ends = Counter(
        line.record.number
        for line in ledger.lines()
        if isinstance(line, TrialLine) and line.record.state is not TrialState.RUNNING and not is_open(line.record)
    )
    for number in sorted(n for n, count in ends.items() if count > 1):
        yield "broken", f"trial {number} was finished {ends[number]} times; the last line counts"


def _open_trials(patient: Patient) -> Found:
    """No trial runs without a driver."""
    if patient.running:
        return
    for trial in patient.history().trials:
        if trial.state is TrialState.RUNNING:
            patient.folder.ledger.append(TrialLine(interrupted(trial)))
            yield (
                "mended",
                f"trial {trial.number} ran when its driver was killed; it keeps its number and will be run again",
            )


def _processes(patient: Patient) -> Found:
    """No process and no shared memory of a killed run is left."""
    if patient.running:
        return
    left = patient.folder.clear_left()
    if left.processes:
        yield "mended", f"{left.processes} processes that a killed run had left were ended"
    if left.segments:
        yield "mended", f"{len(left.segments)} segments of shared memory that a killed run had left were removed"


def _optuna(patient: Patient) -> Found:
    """Optuna knows every finished trial, and none that the ledger has lost."""
    from tuner.opening import proposer_of
    from tuner.proposer import storage_faults
    from tuner.storage import place, storage_of

    history = patient.history()
    if storage_of(patient.file, patient.folder).is_local and not (patient.folder.path / "optuna.db").exists():
        return  # nothing was begun
    with storage_faults(place(patient.file, patient.folder)):
        yield from _told(patient, history, proposer_of(patient.file, patient.folder))


def _told(patient: Patient, history: History, proposer: Proposer) -> Found:
    objectives = objectives_of(patient.file)
    finished = {t.number: t for t in history.finished if not is_open(t)}
    if not patient.running:
        for proposal in proposer.open_trials():
            if proposal.number in finished:
                tell(proposer, objectives, proposal, finished[proposal.number])
                yield "mended", f"trial {proposal.number} was finished and Optuna had not been told; it is now"
    told = proposer.told()
    for number in sorted(finished.keys() - told.keys()):
        yield "broken", f"trial {number} is in the ledger and unknown to Optuna, whose storage is not this study's"
    # A proposal that is known already is told the values of the trial that showed them, and has no line of its own; of
    # one that did not start nothing was measured that could be lost.
    known = {trial.values for number, trial in told.items() if number in finished}
    for number, trial in sorted(told.items()):
        started = trial.violation is not None and trial.violation <= 0
        if trial.state == "COMPLETE" and started and number not in finished and trial.values not in known:
            yield "broken", f"trial {number} was told to Optuna and is lost from the ledger"


def _tables(patient: Patient) -> Found:
    """Every measured trial has its tables."""
    for trial in patient.history().finished:
        if trial.engine is not None and not artifacts.is_whole(patient.folder.trial(trial.number)):
            yield "broken", _without_tables(patient.history(), trial)


def _without_tables(history: History, trial: TrialRecord) -> str:
    text = f"trial {trial.number} has no readable tables under trials/{trial.number}; "
    if trial == history.reference:
        return text + "it is the reference, without which the study cannot go on: start over with `tuner run --fresh`"
    return text + "its score stays, its charts are lost"


def _mlflow(patient: Patient) -> Found:
    """MLflow has one closed run a finished trial."""
    if patient.running:
        return
    from tuner.opening import tracker_of

    done = tracker_of(patient.file).sync(patient.history(), patient.folder.path, live=False)
    if done.written:
        yield "mended", f"{done.written} runs in MLflow were missing, open or out of date; they are as the ledger says"


def _front(patient: Patient) -> Found:
    """The front holds valid measurements only, and nothing predicted among measured ones."""
    study = patient.view()
    measured = any(t.engine is not None and not t.predicted for t in study.trials)
    for number in study.front:
        trial = study.trial(number)
        if trial.state is not TrialState.COMPLETE or (trial.score is not None and trial.score.void):
            yield "broken", f"trial {number} is on the front and is {trial.state}"
        if trial.predicted and measured:
            yield "broken", f"trial {number} is on the front and was predicted, not measured"
        if number in study.in_doubt and study.results[number].measurements == 1:
            text = f"trial {number} is on the front and was measured once, while the machine drifted"
            yield "advice", f"{text}; `confirm: {{rounds: 1}}` measures the front again"


def _modes(patient: Patient) -> Found:
    """Nobody else may read the study's folder: its files may hold values of environment variables."""
    mode = stat.S_IMODE(patient.folder.path.stat().st_mode)
    if mode & 0o077:
        patient.folder.path.chmod(0o700)
        yield "mended", f"others could read {patient.folder.path} (mode {mode:04o}); it is 0700 now"


def _notes(patient: Patient) -> Found:
    """What ended the last run, where it was not the budget or the deadline."""
    notes = patient.history().notes
    last: StudyNote | None = notes[-1] if notes else None
    if last is not None and last.code == "machine":
        yield "advice", f"the last run was ended by the machine: {last.text}"


CHECKS: dict[str, Callable[[Patient], Found]] = {
    "ledger": _ledger,
    "open trials": _open_trials,
    "processes": _processes,
    "optuna": _optuna,
    "tables": _tables,
    "mlflow": _mlflow,
    "front": _front,
    "rights": _modes,
    "ending": _notes,
}
"""In an order in which each finds what those before it have mended."""
