"""What a trial looks like in MLflow: name, tags, params and metrics as plain data. Pure functions.

Tags are what the UI filters on, params are what differs from vLLM's defaults, metrics are finite numbers under names
that MLflow accepts. Nothing here carries a secret.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from tuner.ledger import TrialRecord, TrialState
from tuner.report.words import value_text
from tuner.secrets import MASKED, is_secret, mask, mask_tree, secret_values
from tuner.view import Objective, StudyView, violations

FORMAT = "1"
"""Goes into every revision: raise it when what is written about a trial changes, and old runs are written again."""
LONGEST_VALUE = 500
"""Characters of a param or tag; servers before MLflow 2.10 refuse longer ones."""
LONGEST_NOTE = 5000
"""Characters of a note; experiment tags of older servers end here."""

STATISTICS = ("mean", "p50", "p95", "p99")
LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue")
PLAIN_METRICS = (
    "requests_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "goodput_requests_per_s",
    "achieved_rate_per_s",
    "kv_use_mean",
    "kv_use_max",
    "running_mean",
    "waiting_max",
    "preemptions",
    "prefix_hit_rate",
    "device_memory_peak_gib",
    "device_utilisation_mean",
    "device_temperature_max_c",
    "device_sm_clock_mean_mhz",
    "energy_per_output_token_j",
    "host_memory_peak_gib",
)
"""Metrics of a score that every run gets beside the objectives, so that the UI's lists stay short; the artefact
`score.json` has all of them, also by prompt length."""

_RECORD = TypeAdapter(TrialRecord)
_SPELLED = (("@", ".at_"), (" <= ", ".le_"), (" >= ", ".ge_"))
_NOT_IN_KEYS = re.compile(r"[^\w.\-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric; `at_ms` in Unix milliseconds."""

    key: str
    value: float
    at_ms: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class RunContent:
    """Everything about a run but its files. `documents` are stored as JSON under their names."""

    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: tuple[Point, ...]
    documents: Mapping[str, Any]
    status: str
    started_ms: int
    ended_ms: int | None


def revision(trial: TrialRecord) -> str:
    """16 hex digits that change whenever the record does."""
    return hashlib.sha256(FORMAT.encode() + _RECORD.dump_json(trial)).hexdigest()[:16]


def trial_content(study: StudyView, trial: TrialRecord) -> RunContent:
    """Describe a trial as a run."""
    secrets = secret_values() + secret_values(trial.config.env)
    return RunContent(
        name=f"trial {trial.number:03d}",
        tags={name: _clip(mask(value, secrets)) for name, value in _tags(study, trial).items()}
        | {"mlflow.note.content": _clip(mask(_note(study, trial), secrets), LONGEST_NOTE)},
        params=_params(study, trial, secrets),
        metrics=tuple(_metrics(study, trial)),
        documents=mask_tree(_documents(trial), secrets),
        status=_status(trial),
        started_ms=round(trial.started_at * 1000),
        ended_ms=None if trial.finished_at is None else round(trial.finished_at * 1000),
    )


def front_tags(study: StudyView, number: int) -> dict[str, str]:
    """Tags that move while the study goes on."""
    return {
        "pareto": _switch(number in study.front),
        "knee": _switch(number == study.knee),
        "in_doubt": _switch(number in study.in_doubt),
        "verified": _switch(study.is_verified(number)),
    }


def metric_key(name: str) -> str:
    """Name of a metric in MLflow, where it can be used in a filter without quotes.

    `ttft_p95_s@2048` becomes `ttft_p95_s.at_2048`, and the constraint `ttft_p99_s <= 20` `ttft_p99_s.le_20`.
    """
    for written, key in _SPELLED:
        name = name.replace(written, key)
    return _NOT_IN_KEYS.sub("_", name)


def finite(points: Iterable[Point]) -> tuple[Point, ...]:
    """Leave out what is not a finite number: MLflow stores infinity as 1.8e308, and NaN breaks its lists."""
    return tuple(p for p in points if math.isfinite(p.value))


def _tags(study: StudyView, trial: TrialRecord) -> dict[str, str]:
    tags = {
        "study": study.study,
        "trial": str(trial.number),
        "state": trial.state.value,
        "source": trial.source,
        "reference": _switch(trial.source == "reference"),
        "predicted": _switch(trial.predicted),
        "config": trial.config.key(),
        **front_tags(study, trial.number),
    }
    if study.header:
        tags |= {"vllm": study.header.vllm_version, "workload": study.header.workload_name}
    if trial.engine:
        engine = trial.engine
        tags |= {"engine": engine.engine, "vllm": engine.vllm_version, "model": engine.model}
        tags["gpu"] = f"{engine.device_count} x {engine.device_name}"
    if trial.failure:
        tags |= {"failure.kind": trial.failure.kind.value, "failure.stage": trial.failure.stage.value}
    if trial.score and trial.score.void:
        tags["void"] = ", ".join(reason.code for reason in trial.score.void)
    if trial.repeats is not None:
        tags["repeats"] = str(trial.repeats)
    return tags


def _params(study: StudyView, trial: TrialRecord, secrets: tuple[str, ...]) -> dict[str, str]:
    """Return the searched parameters, and whatever else differs from vLLM's defaults as the study first ran them."""
    first = next((t for t in study.trials if t.source == "reference"), None)
    changed = trial.config.difference(first.config) if first else {}
    values = {**{name: mine for name, (mine, _) in changed.items()}, **trial.params}
    return {
        metric_key(name): MASKED if is_secret(name) else _clip(mask(value_text(value), secrets))
        for name, value in values.items()
    }


def _metrics(study: StudyView, trial: TrialRecord) -> tuple[Point, ...]:
    at_ms = round((trial.finished_at or trial.started_at) * 1000)
    values: dict[str, float] = {}
    if trial.score:
        wanted = dict.fromkeys([*(o.name for o in study.objectives), *plain_metrics()])
        values |= {name: trial.score.values[name] for name in wanted if name in trial.score.values}
        values |= _ends(trial.score.intervals, study.objectives)
    if trial.finished_at is not None:
        values |= {"trial_s": trial.finished_at - trial.started_at, "engine_s": trial.engine_s}
        values["failed_attempts"] = float(len(trial.attempts))
    values |= {f"violation.{name}": value for name, value in violations(trial).items()}
    values |= _engine_values(trial)
    return finite(Point(metric_key(name), float(value), at_ms) for name, value in values.items())


def _ends(intervals: Mapping[str, tuple[float, float]], objectives: Sequence[Objective]) -> dict[str, float]:
    known = {o.name: intervals[o.name] for o in objectives if o.name in intervals}
    return {
        f"{name}.{end}": value for name, pair in known.items() for end, value in zip(("low", "high"), pair, strict=True)
    }


def _engine_values(trial: TrialRecord) -> dict[str, float]:
    values: dict[str, float | None] = {}
    if trial.engine:
        for name in ("start_s", "warmup_s", "stop_s", "kv_tokens", "kv_gib", "weights_gib"):
            values[name] = getattr(trial.engine, name)
    for when, probe in (("before", trial.speed_before), ("after", trial.speed_after)):
        if probe:
            values[f"speed.{when}.prefill_s"] = probe.prefill_s
            values[f"speed.{when}.decode_step_s"] = probe.decode_step_s
    if trial.failure:
        values |= {"needed_gib": trial.failure.needed_gib, "available_gib": trial.failure.available_gib}
    return {name: float(value) for name, value in values.items() if value is not None}


def plain_metrics() -> list[str]:
    """Names of the metrics that every run gets beside the objectives, where its score has them."""
    return [f"{kind}_{statistic}_s" for kind in LATENCIES for statistic in STATISTICS] + list(PLAIN_METRICS)


def _documents(trial: TrialRecord) -> dict[str, Any]:
    record = _RECORD.dump_python(trial, mode="json")
    effective = dict(trial.engine.effective_args) if trial.engine else {}
    config = {"args": record["config"]["args"], "env": record["config"]["env"], "effective_args": effective}
    documents = {"config.json": config, "trial.json": {k: v for k, v in record.items() if k not in ("score", "config")}}
    return documents | ({"score.json": record["score"]} if trial.score else {})


def _status(trial: TrialRecord) -> str:
    """MLflow's state of the run: FAILED wherever no engine ran to the end, whoever is to blame; KILLED where we did."""
    if trial.state is TrialState.RUNNING:
        return "RUNNING"
    if trial.state is TrialState.CENSORED:
        return "KILLED"
    return "FAILED" if trial.failure else "FINISHED"


def _note(study: StudyView, trial: TrialRecord) -> str:
    """Say why the trial ended as it did, for the description on the run's page."""
    lines = ["*Predicted by the twin, not measured.*"] if trial.predicted else []
    if trial.failure:
        failure = trial.failure
        lines.append(f"**{failure.kind.value}** at stage `{failure.stage.value}`: {failure.message}")
        if failure.needed_gib is not None and failure.available_gib is not None:
            lines.append(f"Needed {failure.needed_gib:.2f} GiB, available {failure.available_gib:.2f} GiB.")
        if failure.fitting_tokens is not None:
            lines.append(f"`max_model_len` would fit up to {failure.fitting_tokens} tokens.")
    if trial.score:
        lines += [f"**void ({reason.code})**: {reason.evidence}" for reason in trial.score.void]
        broken = {name: value for name, value in trial.score.violations.items() if value > 0}
        lines += [f"**beyond the constraint** `{name}` by {value:.3g}." for name, value in broken.items()]
        lines += list(trial.score.notes)
    for attempt in trial.attempts:
        why = f"{attempt.failure.kind.value}: {attempt.failure.message}" if attempt.failure else ", ".join(attempt.void)
        lines.append(f"An earlier attempt took {attempt.seconds:.0f} s ({why}).")
    if trial.number == study.knee:
        lines.insert(0, "The knee of the front when this was written.")
    return "\n\n".join(lines)


def _switch(value: bool) -> str:
    return "true" if value else "false"


def _clip(value: str, length: int = LONGEST_VALUE) -> str:
    return value if len(value) <= length else value[: length - 1] + "…"
