"""What follows a study: its end in words, MLflow's UI, the deployment of a choice, and the proof of it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from objectives.measurement import SpeedProbe
from objectives.speed import mean_of_probes
from tuner.commands import load
from tuner.engine.protocol import TrialEngine
from tuner.errors import PickError, TunerError
from tuner.export import FORMATS
from tuner.export.deployment import Deployment, Target, deployment
from tuner.export.files import write as write_files
from tuner.judge import objectives_of
from tuner.ledger import TrialRecord, Verification
from tuner.picks import pick
from tuner.run_plan import measure_plan
from tuner.study_file import StudyFile
from tuner.study_folder import STORE, StudyFolder
from tuner.view import StudyView, view


@dataclass(frozen=True, slots=True)
class Finished:
    """What is said at the end of a run."""

    study: StudyView
    lines: tuple[str, ...]


def finish(file: StudyFile) -> Finished:
    """Export the knee beside the study and say where everything is."""
    from tuner.report.verdict import gains, verdict

    folder = StudyFolder.of(file.spec.study)
    study = view(folder.ledger.history(), objectives_of(file))
    lines = [verdict(study).headline]
    if study.knee is not None and not study.predicted:
        into = folder.path / "knee"
        paths = write_files(FORMATS["vllm"](_deployment(study, study.trial(study.knee))), into, force=True)
        doubt = "" if gains(study, study.knee) else " (no better than the defaults by more than the noise)"
        lines.append(f"knee: trial {study.knee}{doubt}, exported to {' and '.join(_short(p) for p in paths)}")
    if study.front and not study.predicted:
        from tuner.report.html import write_report

        (folder.path / "report").mkdir(exist_ok=True)
        lines.append(f"report: {_short(write_report(study, folder.path, folder.path / 'report'))}")
    lines.append(f"see every trial in MLflow: tuner ui {file.spec.study}")
    return Finished(study, tuple(lines))


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@dataclass(frozen=True, slots=True)
class Ui:
    """MLflow's UI, ready to be started."""

    url: str
    command: tuple[str, ...]
    env: dict[str, str]

    def serve(self) -> int:
        """Run the server until it is ended, and return its exit status."""
        process = subprocess.Popen(self.command, env={**os.environ, **self.env})
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return 0


def ui(study: str | None, port: int | None) -> Ui:
    """Prepare MLflow's UI on the study's store, on 127.0.0.1, opening on its experiment."""
    from tuner.opening import tracker_of
    from tuner.tracking import default_artifact_root, default_uri, experiment_url, ui_command

    root = STORE.resolve().parent
    uri, experiment_id = default_uri(root), None
    if study is not None:
        file, _, folder = load(study)
        uri = file.spec.tracking.uri or uri
        synced = tracker_of(file).sync(folder.ledger.history(), folder.path, live=folder.is_running())
        experiment_id = synced.experiment_id
    server = ui_command(uri, default_artifact_root(root), port)
    return Ui(experiment_url(server.base_url, experiment_id), server.command, server.env)


REGISTRY = "mlflow"
"""The format that is not a folder of files: a version of a registered model in MLflow."""


def export(
    study: str, *, format_name: str, pick_text: str, into: Path, force: bool, verified: bool, allow_different: bool
) -> list[str]:
    """Write a deployment of a trial and return what to show: the files, or where MLflow has it.

    Raises
    ------
    PickError
        When the format or the pick does not exist, or the trial may not be exported.
    """
    file, shown, folder = load(study)
    if format_name not in (*FORMATS, REGISTRY):
        raise PickError(f"--format {format_name}: there is no such format; there are {', '.join((*FORMATS, REGISTRY))}")
    record = pick(shown, pick_text)
    deployed = _deployment(
        shown,
        record,
        target=_here(record),
        require_verified=verified,
        allow_different=allow_different,
    )
    if format_name == REGISTRY:
        return _register(file, folder, deployed)
    return [str(path) for path in write_files(FORMATS[format_name](deployed), into, force=force)]


def _here(record: TrialRecord) -> Target:
    """What this machine would deploy a trial on; no device where it shows no GPU, as where one only administers."""
    from tuner.engine.accelerators import gpus_here
    from tuner.engine.vllm import vllm_version

    on_gpus = record.engine is not None and record.engine.device_name != "cpu"
    gpus = gpus_here() if on_gpus else None
    return Target(vllm_version=vllm_version(), device_name=gpus.name if gpus else None)


def _register(file: StudyFile, folder: StudyFolder, deployed: Deployment) -> list[str]:
    """Register a deployment in MLflow, whose run of the trial is brought up to date first."""
    from tuner.opening import tracker_of

    tracker = tracker_of(file)
    tracker.sync(folder.ledger.history(), folder.path, live=folder.is_running())
    done = tracker.register(deployed)
    was = "registered" if done.created else "was registered already, and is"
    return [f"{done.uri}: version {done.version} (trial {deployed.trial}) {was} {done.alias}"]


def _deployment(study: StudyView, record: TrialRecord, **rules: Any) -> Deployment:
    from tuner.export.defaults import engine_defaults

    return deployment(study, record, defaults=engine_defaults(), **rules)


@dataclass(frozen=True, slots=True)
class Verified:
    """What measuring again, in turns, has shown."""

    verification: Verification

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        v = self.verification
        return {
            "trial": v.number,
            "rounds": v.rounds,
            "over_http": v.over_http,
            "change": dict(v.change),
            "interval": {name: list(ends) for name, ends in v.interval.items()},
            "verdict": dict(v.verdict),
            "runs": [asdict(run) for run in v.runs],
            "agreement": {a.name: {**asdict(a), "within_noise": a.within_noise} for a in v.agreement},
        }

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        from tuner.verify import WORTH_SEEING, agreement_sentence

        v = self.verification
        how = "over HTTP" if v.over_http else "in process"
        lines = [f"trial {v.number} against vLLM's defaults, {v.rounds} rounds, {how}:"]
        for name, change in v.change.items():
            low, high = v.interval[name]
            hidden = v.verdict[name] == "no difference" and (low < -WORTH_SEEING or high > WORTH_SEEING)
            hint = f"; the noise could hide {WORTH_SEEING:.0%}: more --rounds narrow it" if hidden else ""
            lines.append(f"  {name}: {v.verdict[name]}, {change:+.1%} ({low:+.1%} … {high:+.1%}){hint}")
        if v.agreement:
            lines.append(f"trial {v.number} as it is served, against what the study measured in process:")
        return [*lines, *(f"  {agreement_sentence(a)}" for a in v.agreement)]


def verify(study: str, pick_text: str, rounds: int, *, over_http: bool, say: Callable[[str], None]) -> Verified:
    """Measure a pick and vLLM's defaults again, in turns on separate engine starts, and write the verdict down.

    Raises
    ------
    TunerError
        When the pick cannot be verified, or one of both cannot be started.
    """
    from tuner.judge import judge, user_metrics
    from tuner.opening import build_workload, tracker_of
    from tuner.verify import agreement
    from tuner.verify import verify as measure_in_turns

    file, shown, folder = load(study)
    record = pick(shown, pick_text)
    reference = shown.reference
    if reference is None:
        raise PickError(f"{study}: the reference was not measured yet; `tuner run {study}` measures it first")
    with folder.locked():
        workload, metrics = build_workload(file).workload, user_metrics(file)
        log_path = folder.path / "verify" / "engine.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with _served_engine(file, folder, shown, record) if over_http else _own_engine(file, folder) as engine:
            outcome = measure_in_turns(
                engine,
                reference.config,
                record.config,
                workload,
                measure_plan(file.spec.measure, 0, log_path),
                number=record.number,
                rounds=rounds,
                objectives=objectives_of(file),
                score=lambda m: judge(file, m, workload, None, metrics),
                progress=say,
                over_http=over_http,
                seed=int(time.time()),
            )
        if not isinstance(outcome, Verification):
            raise TunerError(f"trial {record.number}: {outcome.kind} at {outcome.stage}: {outcome.message}")
        if over_http:
            compared = agreement(outcome.runs, shown.values(record), _probe(record), shown.noise, shown.objectives)
            outcome = replace(outcome, agreement=compared)
        folder.ledger.append(outcome)
    tracker_of(file).sync(folder.ledger.history(), folder.path, live=False, final=True)
    return Verified(outcome)


def _own_engine(file: StudyFile, folder: StudyFolder) -> AbstractContextManager[TrialEngine]:
    from tuner.opening import machine_of, memory_predictor, one_engine

    return one_engine(file, folder, memory_predictor(file, machine_of(file), folder.ledger.history))


def _served_engine(
    file: StudyFile, folder: StudyFolder, study: StudyView, record: TrialRecord
) -> AbstractContextManager[TrialEngine]:
    """Engine that serves the pick from the very file that `tuner export --format vllm` writes.

    The defaults are served from their export too where they may be exported; where they broke a constraint, from the
    arguments that they were measured with.
    """
    from tuner.engine.serve import ServedTrialEngine

    files = {record.config.key(): _config_text(study, record)}
    if study.reference is not None and study.reference.number in study.results:
        files[study.reference.config.key()] = _config_text(study, study.reference)
    return closing(ServedTrialEngine(folder.note_processes, files))


def _config_text(study: StudyView, record: TrialRecord) -> str:
    deployed = _deployment(study, record)
    return FORMATS["vllm"](deployed)[f"{deployed.name}.yaml"]


def _probe(record: TrialRecord) -> SpeedProbe | None:
    """Speed probe of a trial: the mean of those before and after its workload."""
    return mean_of_probes([p for p in (record.speed_before, record.speed_after) if p is not None])
