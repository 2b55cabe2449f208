"""How far a study is, when it will end and why: for people who look in at night, and for what watches in their place.

A running `tuner run` leaves its limits beside the ledger, since it alone knows them.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from typing import Any

from tuner.artifacts import write_json
from tuner.ledger import History, StudyNote, TrialState
from tuner.night import Deadline, Limits, Outlook, candidates, is_open, outlook
from tuner.pace import Pace, StartKind, first_guess_s, saving
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.view import StudyView, trial_document

RUN = "run.json"
ENDINGS = frozenset({"budget", "converged", "deadline", "exhausted", "machine", "stopped"})
"""Codes of the notes that say why a run ended."""


def note_run(folder: StudyFolder, limits: Limits, deadline: Deadline | None) -> None:
    """Leave the limits of a run that begins now."""
    ends_by = None if deadline is None else time.time() + deadline.left_s()
    write_json(folder.path / RUN, {**dataclasses.asdict(limits), "ends_by": ends_by})


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """How far a study is."""

    file: StudyFile
    study: StudyView
    history: History
    folder: StudyFolder
    running: bool

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        interrupted = self._interrupted()
        counts = Counter(str(t.state) for t in self.study.trials if t.number not in interrupted)
        pace = Pace.of(self.history, first_guess_s(self.file.spec.engine.backend))
        ahead = self.outlook()
        saved = saving(self.history)
        return {
            "study": self.file.spec.study,
            "running": self.running,
            "counts": {str(state): counts.get(str(state), 0) for state in TrialState},
            "interrupted_trials": interrupted,
            "refused_by_gate": sum(t.state is TrialState.INFEASIBLE and t.engine_s == 0 for t in self.study.trials),
            "engine_trials": candidates(self.history),
            "budget": self.file.spec.budget.model_dump(),
            "front": [trial_document(self.study, self.study.trial(n)) for n in self.study.front],
            "hypervolume": self.study.hypervolume,
            "current": next(iter(self._current()), None),
            "current_trials": self._current(),
            "trial_s": pace.trial_s,
            "start_s": {kind.value: pace.start_s.get(kind) for kind in StartKind},
            "compile_cache_saved_s": None if saved is None else saved.saved_s,
            "ends_at": None if ahead is None or ahead.ends_in_s is None else time.time() + ahead.ends_in_s,
            "ends_because": None if ahead is None else ahead.why,
            "ended": None if (ending := self._ending()) is None else {"at": ending.at, "code": ending.code},
            "notes": [note.text for note in self.study.notes],
        }

    def outlook(self) -> Outlook | None:
        """Say when it will end and why; `None` for a study that does not run."""
        if not self.running:
            return None
        try:
            noted = json.loads((self.folder.path / RUN).read_text())
            ends_by = noted.pop("ends_by")
            limits = Limits(**noted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a run that begins just now
            return None
        left_s = None if ends_by is None else ends_by - time.time()
        return outlook(self.history, self.study.front, limits, left_s, runners_up=len(self.study.runners_up))

    def _interrupted(self) -> list[int]:
        return [t.number for t in self.history.trials if is_open(t)]

    def _current(self) -> list[int]:
        return [t.number for t in self.study.trials if t.state is TrialState.RUNNING]

    def _ending(self) -> StudyNote | None:
        """Why the last run ended; `None` while one runs, and where the last one was killed before it could say."""
        ends = [note for note in self.study.notes if note.code in ENDINGS]
        latest = max((t.started_at for t in self.history.trials), default=0.0)
        return ends[-1] if ends and not self.running and ends[-1].at >= latest else None

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        from tuner.display import clock, objective_text

        said = self.document()
        counts = ", ".join(f"{n} {state}" for state, n in said["counts"].items() if n)
        lines = [
            f"{said['study']}: {'running' if self.running else 'not running'}",
            f"trials: {counts or 'none'}; {said['refused_by_gate']} refused without an engine",
        ]
        for number in self.study.front:
            values = self.study.values(self.study.trial(number))
            shown = "  ".join(f"{o.name} {objective_text(o, values[o.name])}" for o in self.study.objectives)
            lines.append(f"front: trial {number}  {shown}")
        went = "runs" if self.running else "was interrupted and will be run again"
        lines += [f"trial {number} {went}" for number in said["current_trials"]]
        lines += [f"trial {n} was interrupted and will be run again" for n in said["interrupted_trials"]]
        if said["ends_at"] is not None:
            lines.append(f"ends about {clock(said['ends_at'])}; {said['ends_because']}")
        elif said["ends_because"] is not None:
            lines.append(said["ends_because"])
        if (ending := self._ending()) is not None:
            lines.append(f"ended {clock(ending.at)}: {ending.text}")
        told = [note for note in self.study.notes if note.code not in ENDINGS]
        return lines + [f"note: {clock(note.at)} {note.text}" for note in told[-5:]]


def summary(name: str, study: StudyView, *, code: str, text: str, hours: float) -> dict[str, Any]:
    """Return what whoever is notified is told: how a run ended and what it found."""
    counts = Counter(t.state.value for t in study.trials)
    return {
        "study": name,
        "ending": code,
        "text": text,
        "hours": round(hours, 3),
        "trials": dict(counts),
        "front": [
            {"trial": n, "knee": n == study.knee, "values": dict(study.values(study.trial(n)))} for n in study.front
        ],
        "hypervolume": study.hypervolume,
        "predicted": study.predicted,
    }
