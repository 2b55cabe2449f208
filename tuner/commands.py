"""What the commands do, without parsing or printing: each is a function from its arguments to a plain result."""

from __future__ import annotations

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import yaml

from objectives.metrics import METRICS
from tuner.errors import StudyFileError, TunerError, UsageError
from tuner.judge import objectives_of
from tuner.ledger import TrialState
from tuner.memory_model import MemoryPrediction
from tuner.pace import Pace
from tuner.space import argument_problem, describe, engine_argument_names
from tuner.study import Ending, Listener, StudyRun, candidates
from tuner.study_file import StudyFile, read
from tuner.study_folder import StudyFolder, find
from tuner.view import StudyView, trial_document, view


def load(study: str) -> tuple[StudyFile, StudyView, StudyFolder]:
    """Read a study's file and what happened in it so far.

    Raises
    ------
    StudyFileError
        When there is no such study, or nothing of it was run here.
    """
    file = read(find(study))
    folder = StudyFolder.of(file.spec.study)
    history = folder.ledger.history()
    if history.header is None:
        text = f"study {file.spec.study} was not run in this folder yet; `tuner run {study}` starts it"
        raise StudyFileError(str(file.path), [("", text)])
    return file, view(history, objectives_of(file)), folder


# check, memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """Everything that is known of a study before an engine starts."""

    file: StudyFile
    workload: dict[str, Any]
    skipped_lines: tuple[str, ...]
    recipes: tuple[tuple[str, str], ...]
    memory: dict[str, Any] | None
    running: bool

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "study": self.file.spec.study,
            "model": self.file.model,
            "workload": self.workload,
            "skipped_lines": list(self.skipped_lines),
            "space": dict(describe(self.file.spec.space)),
            "recipes": dict(self.recipes),
            "objectives": [
                {"name": o.name, "unit": o.unit, "direction": o.direction} for o in objectives_of(self.file)
            ],
            "constraints": ["memory", *self.file.spec.constraints],
            "memory": self.memory,
            "metrics": [
                {"name": m.name, "unit": m.unit, "direction": m.direction, "description": m.description}
                for m in METRICS.values()
            ],
            "running": self.running,
        }

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        w = self.workload
        lines = [
            f"{self.file.path}: right",
            f"study      {self.file.spec.study}" + (" (running)" if self.running else ""),
            f"model      {self.file.model}",
            f"workload   {w['requests']} requests, {w['prompt_tokens']:,} prompt and {w['output_tokens']:,} output "
            f"tokens, longest {w['longest_tokens']:,}, last arrival after {w['last_arrival_s']:.1f} s, fingerprint "
            f"{w['fingerprint']}",
        ]
        lines += [f"           skipped: {line}" for line in self.skipped_lines[:10]]
        lines += [f"space      {name}: {text}" for name, text in describe(self.file.spec.space)]
        lines += [f"objective  {o.name} ({o.unit or 'own'}), {o.direction}" for o in objectives_of(self.file)]
        lines += [f"constraint {text}" for text in ("memory", *self.file.spec.constraints)]
        lines += [f"recipe     {name}: {text}" for name, text in self.recipes]
        if self.memory is not None:
            fit = "fit" if self.memory["fits"] else "do not fit"
            lines.append(f"memory     vLLM's defaults {fit}: violation {self.memory['violation']:+.3f}")
        lines.append("metrics    " + ", ".join(METRICS))
        return lines


def check(study: str) -> Checked:
    """Check a study without starting an engine.

    Raises
    ------
    TunerError
        With everything that is wrong.
    """
    from tuner.memory_model import as_document
    from tuner.opening import build_workload
    from tuner.recipes import RECIPES, Skipped, applicable

    file = read(find(study))
    folder = StudyFolder.of(file.spec.study)
    built = build_workload(file)
    requests = built.workload.requests
    recipes = []
    for name in RECIPES:
        changes = applicable(
            name,
            fixed=file.spec.engine.args,
            longest_tokens=built.workload.longest_tokens,
            num_gpus=file.spec.resources.num_gpus,
        )
        used = "" if name in file.spec.recipes else " (not in this study)"
        recipes.append((name, f"{changes.reason if isinstance(changes, Skipped) else RECIPES[name].purpose}{used}"))
    try:
        prediction = memory(study, [])[0]
    except TunerError:
        prediction = None  # no device or no config.json here: `tuner memory` says which
    return Checked(
        file=file,
        workload={
            "name": built.workload.name,
            "requests": len(requests),
            "prompt_tokens": sum(r.prompt_tokens for r in requests),
            "output_tokens": sum(r.output_tokens for r in requests),
            "longest_tokens": built.workload.longest_tokens,
            "last_arrival_s": max(r.arrival_s for r in requests),
            "fingerprint": built.workload.fingerprint(),
        },
        skipped_lines=tuple(str(line) for line in built.skipped),
        recipes=tuple(recipes),
        memory=None if prediction is None else as_document(prediction),
        running=folder.is_running(),
    )


def memory(study: str, changes: Sequence[str]) -> tuple[MemoryPrediction, str]:
    """Predict the memory of a study's reference with some arguments changed, and say what was changed.

    Raises
    ------
    UsageError
        For a change that is no `KEY=VALUE` of an engine argument, or a model whose configuration is not here.
    """
    from tuner.opening import base_config, machine_of, memory_predictor

    file = read(find(study))
    parsed = dict(_change(text) for text in changes)
    config = base_config(file).with_args(parsed)
    folder = StudyFolder.of(file.spec.study)
    prediction = memory_predictor(file, machine_of(file), folder.ledger.history)(config)
    if prediction is None:
        raise StudyFileError(
            str(file.path), [("model", "its config.json is not on this machine; name one under model_config_file")]
        )
    return prediction, "".join(f"{name}={value} " for name, value in parsed.items())


def _change(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--set {text}: write it as KEY=VALUE, such as max_num_seqs=64")
    if problem := argument_problem(name, engine_argument_names()):
        raise UsageError(f"--set {text}: {problem}")
    return name, yaml.safe_load(value)


# run, status --------------------------------------------------------------------------------------------------------


def run(
    file: StudyFile, listener: Listener, *, fresh: bool = False, trials: int | None = None, until: str | None = None
) -> Ending:
    """Run a study or go on with it, and return why it ended.

    Raises
    ------
    TunerError
        When it cannot run or cannot go on.
    """
    from tuner.opening import opened

    deadlines = [] if until is None else [next_time(until, time.time())]
    if file.spec.budget.hours is not None:
        deadlines.append(time.time() + 3600 * file.spec.budget.hours)
    with opened(file, listener, fresh=fresh) as rooms:
        study = StudyRun(
            rooms,
            trials=trials if trials is not None else file.spec.budget.trials,
            deadline=min(deadlines) if deadlines else None,
        )
        return study.run()


def next_time(text: str, now: float) -> float:
    """Return the next moment, in Unix seconds, at which local clocks show `HH:MM`; across midnight and clock changes.

    Raises
    ------
    UsageError
        When the text is no time of day.
    """
    try:
        wanted = datetime.strptime(text, "%H:%M").time()
    except ValueError as error:
        raise UsageError(f"--until {text}: write it as HH:MM, such as 07:00") from error
    today = datetime.fromtimestamp(now)
    moment = today.replace(hour=wanted.hour, minute=wanted.minute, second=0, microsecond=0)
    if moment.timestamp() <= now:
        moment += timedelta(days=1)
    return moment.timestamp()


@dataclass(frozen=True, slots=True)
class Status:
    """How far a study is."""

    file: StudyFile
    study: StudyView
    running: bool

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        counts = Counter(str(t.state) for t in self.study.trials)
        pace = Pace.of(self._history)
        return {
            "study": self.file.spec.study,
            "running": self.running,
            "counts": {str(state): counts.get(str(state), 0) for state in TrialState},
            "refused_by_gate": sum(t.state is TrialState.INFEASIBLE and t.engine_s == 0 for t in self.study.trials),
            "engine_trials": candidates(self._history),
            "budget": self.file.spec.budget.model_dump(),
            "front": [trial_document(self.study, self.study.trial(n)) for n in self.study.front],
            "hypervolume": self.study.hypervolume,
            "current": next((t.number for t in self.study.trials if t.state is TrialState.RUNNING), None),
            "trial_s": pace.trial_s,
            "ends_at": self._ends_at(pace),
            "notes": [note.text for note in self.study.notes],
        }

    @property
    def _history(self) -> Any:
        return StudyFolder.of(self.file.spec.study).ledger.history()

    def _ends_at(self, pace: Pace) -> float | None:
        total = self.file.spec.budget.trials
        if not self.running or total is None:
            return None
        return time.time() + pace.trial_s * max(0, total - candidates(self._history))

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        from tuner.display import clock, duration, objective_text

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
        if said["current"] is not None:
            went = "runs" if self.running else "was interrupted and will be run again"
            lines.append(f"trial {said['current']} {went}")
        if said["ends_at"] is not None:
            lines.append(f"ends about {clock(said['ends_at'])}: a trial takes about {duration(said['trial_s'])}")
        return lines + [f"note: {text}" for text in said["notes"][-5:]]


def status(study: str) -> Status:
    """Say how far a study is."""
    file, shown, folder = load(study)
    return Status(file, shown, folder.is_running())


def trials_csv(study: StudyView) -> str:
    """Return every trial as a row of CSV: state, objectives with intervals, violations, parameters."""
    names = list(dict.fromkeys(name for t in study.trials for name in t.params))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    ends = [f"{o.name}{end}" for o in study.objectives for end in ("", "_low", "_high")]
    fields = ["number", "state", "source", "pareto", "knee", "verified"]
    writer.writerow([*fields, *ends, "memory_violation", "failure", *names])
    for trial in study.trials:
        document = trial_document(study, trial)
        cells = []
        for objective in study.objectives:
            interval = document["intervals"].get(objective.name) or (None, None)
            cells += [document["values"].get(objective.name), *interval]
        failure = document["failure"]["kind"] if document["failure"] else None
        params = [json.dumps(v) if isinstance(v := trial.params.get(n), dict | list) else v for n in names]
        head = [trial.number, *(document[key] for key in fields[1:])]
        writer.writerow([*head, *cells, document["violations"].get("memory"), failure, *params])
    return buffer.getvalue()
