"""What follows a study: its end in words, MLflow's UI, the deployment of a choice, and the proof of it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.commands import load
from tuner.errors import PickError, TunerError
from tuner.export import FORMATS
from tuner.judge import objectives_of
from tuner.ledger import TrialRecord, Verification
from tuner.picks import pick
from tuner.study import measure_plan
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
    from tuner.report.verdict import verdict

    folder = StudyFolder.of(file.spec.study)
    study = view(folder.ledger.history(), objectives_of(file))
    lines = [verdict(study).headline]
    if study.knee is not None and not study.predicted:
        into = folder.path / "knee"
        paths = _write_export(file, study, study.trial(study.knee), "vllm", into, force=True, target=None)
        lines.append(f"knee: trial {study.knee}, exported to {' and '.join(_short(p) for p in paths)}")
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


def export(
    study: str, *, format_name: str, pick_text: str, into: Path, force: bool, verified: bool, allow_different: bool
) -> list[Path]:
    """Write a deployment of a trial and return the files.

    Raises
    ------
    PickError
        When the format or the pick does not exist, or the trial may not be exported.
    """
    from tuner.engine.vllm import vllm_version
    from tuner.export.deployment import Target

    file, shown, _ = load(study)
    if format_name not in FORMATS:
        raise PickError(f"--format {format_name}: there is no such format; there are {', '.join(FORMATS)}")
    target = Target(vllm_version=vllm_version())
    return _write_export(
        file,
        shown,
        pick(shown, pick_text),
        format_name,
        into,
        force=force,
        target=target,
        verified=verified,
        allow_different=allow_different,
    )


def _write_export(
    file: StudyFile,
    study: StudyView,
    record: TrialRecord,
    format_name: str,
    into: Path,
    *,
    force: bool,
    target: Any,
    verified: bool = False,
    allow_different: bool = False,
) -> list[Path]:
    from tuner.export.defaults import engine_defaults
    from tuner.export.deployment import Target, deployment
    from tuner.export.files import write

    deployed = deployment(
        study,
        record,
        defaults=engine_defaults(),
        target=target or Target(),
        require_verified=verified,
        allow_different=allow_different,
    )
    return write(FORMATS[format_name](deployed), into, force=force)


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
        }

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        v = self.verification
        how = "over HTTP" if v.over_http else "in process"
        return [f"trial {v.number} against vLLM's defaults, {v.rounds} rounds, {how}:"] + [
            f"  {name}: {v.verdict[name]}, {change:+.1%} ({v.interval[name][0]:+.1%} … {v.interval[name][1]:+.1%})"
            for name, change in v.change.items()
        ]


def verify(study: str, pick_text: str, rounds: int, *, over_http: bool, say: Callable[[str], None]) -> Verified:
    """Measure a pick and vLLM's defaults again, in turns on separate engine starts, and write the verdict down.

    Raises
    ------
    TunerError
        When the pick cannot be verified, or one of both cannot be started.
    """
    from tuner.judge import judge, user_metrics
    from tuner.opening import build_workload, machine_of, make_engine, memory_predictor
    from tuner.verify import verify as measure_in_turns

    file, shown, folder = load(study)
    record = pick(shown, pick_text)
    reference = shown.reference
    if reference is None:
        raise PickError(f"{study}: the reference was not measured yet; `tuner run {study}` measures it first")
    with folder.locked():
        workload, metrics = build_workload(file).workload, user_metrics(file)
        if over_http:
            from tuner.engine.serve import ServedTrialEngine

            engine: Any = ServedTrialEngine(folder.note_processes)
        else:
            engine = make_engine(file, folder, memory_predictor(file, machine_of(file), folder.ledger.history))
        try:
            outcome = measure_in_turns(
                engine,
                reference.config,
                record.config,
                workload,
                measure_plan(file.spec.measure, 0, folder.path / "verify" / "engine.log"),
                number=record.number,
                rounds=rounds,
                objectives=objectives_of(file),
                score=lambda m: judge(file, m, workload, None, metrics),
                progress=say,
                over_http=over_http,
                seed=int(time.time()),
            )
        finally:
            engine.close()
        if not isinstance(outcome, Verification):
            raise TunerError(f"trial {record.number}: {outcome.kind} at {outcome.stage}: {outcome.message}")
        outcome = replace(outcome, finished_at=time.time())
        folder.ledger.append(outcome)
    from tuner.opening import tracker_of

    tracker_of(file).sync(folder.ledger.history(), folder.path, live=False)
    return Verified(outcome)
