"""`tuner plan`: what a study will bring, before its night and on any machine. Everything here is predicted.

The share of the space that fits (the gate's memory model), the front and what matters for it (the twin), and the hours
that the budget comes to. Figures go to `mlruns/plans/STUDY/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tuner.calibration import Calibration, Calibrator
from tuner.config import EngineConfig
from tuner.display import front_table
from tuner.first_trials import recipe_changes
from tuner.forecast import Candidate, Forecast, Forecaster, Forecasts, SpaceShare, samples, share_of_space
from tuner.gate import Gate
from tuner.judge import objectives_of, user_metrics
from tuner.ledger import History, StudyHeader, TrialState
from tuner.opening import (
    Machine,
    base_config,
    build_workload,
    make_twin,
    memory_predictor,
    planned_machine,
)
from tuner.plan_tables import hours_table, importance_table, space_table, thinned
from tuner.probe import PROBE_OUTPUT_TOKENS, PROBE_PROMPT_TOKENS
from tuner.recipes import RECIPES, Skipped
from tuner.report.charts import front_chart, importance_chart
from tuner.report.figures import write_charts
from tuner.report.importance import Importance, importances
from tuner.report.parallel import parameters_chart
from tuner.study_file import StudyFile, read
from tuner.study_folder import STORE, StudyFolder, find
from tuner.study_hours import (
    STOP,
    WARMUP_PROBES,
    Assumed,
    Hours,
    TrialTime,
    hours,
    measured_time,
    spread,
    start_time,
)
from tuner.view import StudyView, front_document, view
from tuner.workload.model import Request, Workload

SAMPLES = 256
"""Points of the space that the gate is asked about: a share is then known to about three points in a hundred."""
TWIN_LIMIT_S = 60.0
"""What the twin may take for its predictions, its first one excepted."""
WARMUP_OUTPUT_TOKENS = 4

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a study will bring.

    Parameters
    ----------
    predicted_trials:
        Configurations that the twin played: the reference, the recipes, and points of the space.
    twin_s:
        What that took.
    skipped:
        Recipe -> why it cannot be tried.
    calibration:
        By the trials of the study that were measured on this device; `None` before the first.
    """

    file: StudyFile
    machine: Machine
    workload: Workload
    space: SpaceShare
    study: StudyView
    importance: Sequence[Importance]
    hours: Hours
    predicted_trials: int
    twin_s: float
    unpredictable: dict[str, int]
    skipped: dict[str, str]
    figures: tuple[Path, ...]
    calibration: Calibration | None

    def document(self) -> dict[str, Any]:
        """Return the document of `tuner plan --json`; every number in it is predicted."""
        front = front_document(self.study)
        return {
            "study": self.file.spec.study,
            "predicted": True,
            "device": {
                "name": self.machine.name,
                "count": max(1, self.file.spec.resources.gpus_per_engine),
                "total_gib": round(self.machine.total_gib, 2),
            },
            "vllm_version": self.machine.vllm_version,
            "space": {
                "samples": self.space.samples,
                "fits_share": round(self.space.fits, 4),
                "uncertain_share": round(self.space.uncertain / self.space.samples, 4),
                "refused_share": round(self.space.refused / self.space.samples, 4),
                "refused_by_kind": dict(self.space.reasons),
            },
            "front": {
                "trials": [trial for trial in front["trials"] if trial["pareto"]],
                "reference": front["reference"],
                "objectives": front["objectives"],
                "hypervolume": front["hypervolume"],
            },
            "recipes": [t for t in front["trials"] if t["source"].startswith("recipe:")],
            "skipped_recipes": self.skipped,
            "importance": [
                {"target": i.target, "explained": round(i.explained, 3), "trials": i.trials}
                | {"shares": {name: round(share, 4) for name, share in i.shares.items()}}
                for i in self.importance
            ],
            "time": self.hours.document(),
            "twin": {
                "not_modelled": self.not_modelled,
                "trials": self.predicted_trials,
                "seconds": round(self.twin_s, 1),
                "calibrated": self.calibration is not None,
                "calibrated_on": list(self.calibration.trials) if self.calibration else [],
                "unpredictable": self.unpredictable,
            },
            "figures": [str(path) for path in self.figures],
        }

    def renderables(self) -> list[Table | Text]:
        """Return it as tables and lines for rich."""
        return [
            space_table(self.space),
            front_table(thinned(self.study), f"{self.file.spec.study}: predicted front beside the predicted reference"),
            importance_table([i for i in self.importance if i.explained > 0], self.file.spec.space, self.not_modelled),
            hours_table(self.hours),
            Text("\n".join(self._lines())),
        ]

    @property
    def not_modelled(self) -> list[str]:
        """Searched parameters of which the twin knows no effect: only the study can show it."""
        from tuner.engine.twin.engine import PREDICTED_ARGS

        return [name for name in self.file.spec.space if name not in PREDICTED_ARGS]

    @property
    def _trust(self) -> str:
        """How far the twin's figures can be trusted, in words."""
        if self.calibration is None:
            return (
                "The twin is not calibrated for this device: trust the order of its configurations more than its "
                "figures."
            )
        text = f"The twin is calibrated on {len(self.calibration.trials)} measured trials of this study"
        interval = self.calibration.sets.shared.ratio_interval
        if interval is None:
            return f"{text}."
        return f"{text}, whose steps took {interval[0]:.2f} to {interval[1]:.2f} times what it predicts."

    def _lines(self) -> list[str]:
        count = max(1, self.file.spec.resources.gpus_per_engine)
        lines = [
            f"predicted for {count} × {self.machine.name} ({self.machine.total_gib:.1f} GiB each) with vLLM "
            f"{self.machine.vllm_version}: {self.predicted_trials} configurations on the twin in {self.twin_s:.0f} s. "
            + self._trust
        ]
        states = {t.source.removeprefix("recipe:"): t for t in self.study.trials if t.source.startswith("recipe:")}
        lines += [
            f"recipe {name} is predicted not to run: {trial.failure.message}"
            for name, trial in states.items()
            if trial.failure is not None
        ]
        lines += [f"recipe {name} is skipped: {reason}" for name, reason in self.skipped.items()]
        lines += [f"not predicted ({number}): {reason}" for reason, number in self.unpredictable.items()]
        return lines + [f"figure {path}" for path in self.figures]


def plan(study: str, say: Say, *, limit_s: float = TWIN_LIMIT_S, store: Path = STORE) -> Plan:
    """Predict what a study will bring; starts no engine and needs no GPU.

    Parameters
    ----------
    say:
        Told what is being done.
    limit_s:
        Seconds for the twin's predictions after its first.
    store:
        Folder of the store; figures go to `plans/STUDY/` in it.

    Raises
    ------
    TunerError
        When the study file is wrong, or the model's `config.json` or the device is not known here.
    """
    file = read(find(study, store))
    machine, device = planned_machine(file)
    folder = StudyFolder.of(file.spec.study, store)
    history = folder.ledger.history()
    memory = memory_predictor(file, machine, lambda: history)
    workload = build_workload(file, store).workload
    calibrator = Calibrator(folder, workload, make_twin(file, device, memory))
    calibration, twin = calibrator.of(history), calibrator.engine(history)
    base = base_config(file)
    gate = Gate(None, memory, longest_tokens=workload.longest_tokens, memory="refuse")
    say(f"memory: asking about {SAMPLES} points of the space on {machine.name}")
    space = share_of_space(file, gate, base, SAMPLES)
    candidates, skipped = _candidates(file, workload)
    forecaster = Forecaster(file, workload, base, gate, twin, user_metrics(file))
    say(f"twin: predicting the reference, {len(candidates) - 1 - SAMPLES} recipes and the space for {limit_s:.0f} s")
    began_s = time.monotonic()
    forecasts = forecaster.forecast(candidates, limit_s)
    twin_s = time.monotonic() - began_s
    shown = view(_history(file, workload, machine, forecasts), objectives_of(file))
    taken = _trial_time(file, history, machine, forecaster, forecasts.trials)
    say("figures: drawing")
    return Plan(
        file=file,
        machine=machine,
        workload=workload,
        space=space,
        study=shown,
        importance=tuple(importances(shown)),
        hours=hours(file.spec, taken),
        predicted_trials=sum(f.workload_s is not None for f in forecasts.trials),
        twin_s=twin_s,
        unpredictable=dict(forecasts.unpredictable),
        skipped=skipped,
        figures=_draw(shown, store / "plans" / file.spec.study),
        calibration=calibration,
    )


def _candidates(file: StudyFile, workload: Workload) -> tuple[list[Candidate], dict[str, str]]:
    """Return what the study will begin with and points of its space, and the recipes that it skips."""
    found, skipped = [Candidate("reference", {})], {}
    for name in file.spec.recipes or RECIPES:
        changes = recipe_changes(file, workload, name)
        if isinstance(changes, Skipped):
            skipped[name] = changes.reason
        else:
            found.append(Candidate(f"recipe:{name}", changes))
    return [*found, *samples(file, SAMPLES)], skipped


def _history(file: StudyFile, workload: Workload, machine: Machine, forecasts: Forecasts) -> History:
    from tuner import __version__

    header = StudyHeader(
        study=file.spec.study,
        spec_hash=file.spec.identity(),
        workload_fingerprint=workload.fingerprint(),
        workload_name=workload.name,
        vllm_version=machine.vllm_version,
        tuner_version=__version__,
        created_at=0.0,
    )
    return History(header, tuple(f.record for f in forecasts.trials), (), ())


def _trial_time(
    file: StudyFile, history: History, machine: Machine, forecaster: Forecaster, trials: Sequence[Forecast]
) -> TrialTime:
    """Return what one trial takes: measured where the study has begun, else put together from predictions."""
    if (measured := measured_time(history)) is not None:
        return measured
    played = [f for f in trials if f.workload_s is not None]
    if file.spec.engine.backend == "twin":
        nothing = Assumed(0, 0, 0)
        return TrialTime(
            nothing, 0.0, spread([f.twin_s for f in played]), 0.0, nothing, "time that the twin itself takes"
        )
    weights = [f.weights_gib for f in played if f.weights_gib is not None]
    warmup_s, probe_s = _warmup(forecaster, played[0].record.config) if played else (0.0, 0.0)
    return TrialTime(
        start_time(
            weights_gib=max(weights, default=0.0),
            on_cpu=machine.device == "cpu",
            eager=bool(file.spec.engine.args.get("enforce_eager")),
        ),
        warmup_s,
        spread([f.workload_s for f in played if f.workload_s is not None]),
        probe_s if file.spec.measure.speed_probe else 0.0,
        STOP,
        "workload, warm-up and probe predicted on the twin; start and stop as published start-up logs show them",
    )


def _warmup(forecaster: Forecaster, config: EngineConfig) -> tuple[float, float]:
    """Predicted seconds of the warm-up (the longest prompt, then probes) and of one probe."""
    longest = max(forecaster.workload.requests, key=lambda r: r.prompt_tokens)
    ids = longest.prompt_token_ids
    once = Request(0.0, ids, min(longest.output_tokens, WARMUP_OUTPUT_TOKENS))
    probe = Request(0.0, ids[:PROBE_PROMPT_TOKENS], PROBE_OUTPUT_TOKENS)
    longest_s, probe_s = (
        forecaster.duration_s(config, Workload("warm-up", (request,), forecaster.workload.vocabulary, 0))
        for request in (once, probe)
    )
    return longest_s + WARMUP_PROBES * probe_s, probe_s


def _draw(study: StudyView, into: Path) -> tuple[Path, ...]:
    """Write the figures and return their files."""
    if not any(t.state is TrialState.COMPLETE for t in study.trials):
        return ()
    charts = [front_chart(study), importance_chart(study), parameters_chart(study)]
    drawn = write_charts([c for c in charts if c.panels], into)
    return tuple(into / f"{d.chart.name}.{ending}" for d in drawn for ending in ("png", "html"))
