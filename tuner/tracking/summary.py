"""The summary run: figures, report and verdict of the whole study, and the note at the top of the experiment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tuner.ledger import TrialState
from tuner.report.figures import write_figures
from tuner.report.html import report_page
from tuner.report.verdict import Verdict, verdict
from tuner.secrets import mask, secret_values
from tuner.tracking.content import LONGEST_NOTE, Point, finite, metric_key
from tuner.tracking.views import FRONT, TRIALS, view_link
from tuner.view import StudyView, front_document, hypervolume_series

SUMMARY = "summary"
"""Name of the run, and the tag that it is found by."""
HYPERVOLUME = "hypervolume"
FIGURES = "figures"
"""Folder of the run's files that the figures lie in."""


def summary_tags(study: StudyView) -> dict[str, str]:
    """Tags of the summary run."""
    header = study.header
    tags = {SUMMARY: "true", "study": study.study, "predicted": "true" if study.predicted else "false"}
    if header:
        tags |= {"vllm": header.vllm_version, "tuner": header.tuner_version, "workload": header.workload_name}
    return tags


def summary_points(study: StudyView, after_step: int) -> tuple[Point, ...]:
    """Return the hypervolume after each trial that is not stored yet, and the counts as they are now.

    Parameters
    ----------
    after_step:
        Number of the last trial whose hypervolume is stored.
    """
    series = hypervolume_series(study)
    points = [
        Point(HYPERVOLUME, volume, round((trial.finished_at or 0.0) * 1000), trial.number)
        for trial, volume in series
        if trial.number > after_step
    ]
    now_ms = round(max((t.finished_at or t.started_at for t in study.trials), default=0.0) * 1000)
    states = Counter(t.state for t in study.trials)
    values = {f"trials.{state.value}": float(states[state]) for state in TrialState}
    values |= {"front_size": float(len(study.front))}
    values |= {metric_key(f"noise.{name}"): floor for name, floor in study.noise.items()}
    step = len(study.trials)
    return finite([*points, *(Point(name, value, now_ms, step) for name, value in values.items())])


def stage_summary(into: Path, study: StudyView, folder: Path, experiment_id: str, runs: Mapping[int, str]) -> None:
    """Put figures, report and front document into the empty folder `into`.

    Parameters
    ----------
    folder:
        Of the study, with `trials/N/`.
    runs:
        Trial number -> its run, which a click on its point names.
    """
    places = {number: f"run {run_id}, at {run_link(experiment_id, run_id)}" for number, run_id in runs.items()}
    drawn = write_figures(study, folder, into / FIGURES, places)
    (into / "report.html").write_text(report_page(study, drawn), encoding="utf-8")
    (into / "front.json").write_text(json.dumps(front_document(study), indent=1), encoding="utf-8")


def experiment_note(study: StudyView, experiment_id: str, run_id: str) -> str:
    """Return the note at the top of the experiment: the verdict, and where to look."""
    said = verdict(study)
    lines = [f"**{said.headline}**", *_trade_offs(said)]
    lines += [said.verification] if said.verification else []
    links = {
        "Figures": run_link(experiment_id, run_id, f"{FIGURES}/front.html"),
        "Report": run_link(experiment_id, run_id, "report.html"),
        "All trials": view_link(experiment_id, TRIALS),
        "The front in MLflow's charts": view_link(experiment_id, FRONT),
    }
    lines.append(" · ".join(f"[{text}]({link})" for text, link in links.items()))
    lines.append("Filter the runs with `tags.pareto = 'true'`, `tags.knee = 'true'` or `tags.state = 'infeasible'`.")
    lines += list(said.trust)
    note = mask("\n\n".join(lines), secret_values())
    return note if len(note) <= LONGEST_NOTE else note[: LONGEST_NOTE - 1] + "…"


def run_link(experiment_id: str, run_id: str, file: str | None = None) -> str:
    """Address of a run, or of one of its files, within MLflow's UI, whatever host it is served from."""
    place = f"/artifacts/{file}" if file else ""
    return f"#/experiments/{experiment_id}/runs/{run_id}{place}?workflowType=machine_learning"


def _trade_offs(said: Verdict) -> list[str]:
    return ["\n".join(f"- {t.title}: trial {t.row.number}. {t.sentence} `{t.changed}`" for t in said.trade_offs)]
