"""What the commands do, without parsing or printing: each is a function from its arguments to a plain result."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from objectives.metrics import METRICS
from tuner.errors import StudyFileError, TunerError, UsageError
from tuner.judge import objectives_of
from tuner.memory_model import MemoryPrediction
from tuner.night import Deadline
from tuner.space import argument_problem, describe, engine_argument_names
from tuner.status import Status
from tuner.study import Ending, Listener, StudyRun
from tuner.study_file import StudyFile, read
from tuner.study_folder import StudyFolder, find
from tuner.view import StudyView, trial_document, view

if TYPE_CHECKING:
    from tuner.doctor import Examination


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
        for (unit, direction), names in _metrics_by_kind().items():
            lines.append(f"metrics    {unit or 'no unit'}, {direction}: {', '.join(names)}")
        if self.memory is not None:
            lines.append(f"memory     {_reference_memory(self.memory)}")
        return lines


def _metrics_by_kind() -> dict[tuple[str, str], list[str]]:
    """Names of the metrics by unit and direction."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for metric in METRICS.values():
        kinds.setdefault((metric.unit, metric.direction), []).append(metric.name)
    return kinds


def _reference_memory(memory: Mapping[str, Any]) -> str:
    """Say in words whether the reference fits: `tuner memory` has the figures one by one."""
    share = abs(memory["violation"])
    if memory["fits"]:
        return f"the reference (vLLM's defaults and engine.args) fits, with {share:.0%} of what is needed to spare"
    return (
        f"the reference (vLLM's defaults and engine.args) is predicted NOT to fit, by {share:.1%}: trial 0 will "
        "fail and nothing can be compared with it; `tuner memory` says what takes how much, change engine.args"
    )


def check(study: str) -> Checked:
    """Check a study without starting an engine.

    Raises
    ------
    TunerError
        With everything that is wrong.
    """
    from tuner.first_trials import recipe_changes
    from tuner.memory_model import as_document
    from tuner.opening import build_workload
    from tuner.recipes import RECIPES, Skipped

    file = read(find(study))
    folder = StudyFolder.of(file.spec.study)
    built = build_workload(file)
    requests = built.workload.requests
    recipes = []
    for name in RECIPES:
        changes = recipe_changes(file, built.workload, name)
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
    parsed = argument_changes(changes)
    config = base_config(file).with_args(parsed)
    folder = StudyFolder.of(file.spec.study)
    prediction = memory_predictor(file, machine_of(file), folder.ledger.history)(config)
    if prediction is None:
        raise StudyFileError(
            str(file.path), [("model", "its config.json is not on this machine; name one under model_config_file")]
        )
    return prediction, "".join(f"{name}={value} " for name, value in parsed.items())


def argument_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Read what `--set` is given: `KEY=VALUE` of engine arguments, the value as YAML.

    Raises
    ------
    UsageError
        For anything else, or an argument that vLLM does not have.
    """
    changes = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"--set {text}: write it as KEY=VALUE, such as max_num_seqs=64")
        if problem := argument_problem(name, engine_argument_names()):
            raise UsageError(f"--set {text}: {problem}")
        changes[name] = yaml.safe_load(value)
    return changes


# run, status --------------------------------------------------------------------------------------------------------


def run(
    file: StudyFile,
    listener: Listener,
    *,
    fresh: bool = False,
    trials: int | None = None,
    until: str | None = None,
    allow_different: bool = False,
) -> Ending:
    """Run a study or go on with it, and return why it ended.

    Raises
    ------
    TunerError
        When it cannot run or cannot go on.
    """
    from tuner.opening import opened
    from tuner.proposer import storage_faults
    from tuner.storage import place
    from tuner.watching import served, watched

    deadline = Deadline.of(until, file.spec.budget.hours)
    with watched(file, listener) as watch:
        with (
            storage_faults(place(file, watch.folder)),
            opened(file, watch, fresh=fresh, allow_different=allow_different) as rooms,
            served(watch, trials, deadline),
        ):
            ending = StudyRun(rooms, trials=trials, deadline=deadline).run()
        watch.ending = ending
    return ending


def status(study: str) -> Status:
    """Say how far a study is."""
    file, shown, folder = load(study)
    return Status(file, shown, folder.ledger.history(), folder, folder.is_running())


def examined(study: str) -> Examination:
    """Check a study that was run, and mend what can be mended.

    Raises
    ------
    StudyFileError
        When there is no such study, or nothing of it was run here.
    """
    from tuner.doctor import examine

    file = read(find(study))
    if not StudyFolder.of(file.spec.study).path.exists():
        raise StudyFileError(str(file.path), [("", f"study {file.spec.study} was not run in this folder yet")])
    return examine(file)


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
