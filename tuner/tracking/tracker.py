"""Brings an MLflow experiment up to date with a study's history. Idempotent: what is there already stays as it is.

Each trial is one flat run, found again by its tag `trial`; the tag `revision`, set last, says that everything about the
record is in the store. What was begun and not finished is finished, what is there twice (an answer of the server that
got lost) is removed. No cursor is kept anywhere: the store itself says what it has.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner.errors import StoreError
from tuner.export.deployment import Deployment
from tuner.ledger import History, StudyHeader, TrialRecord, TrialState
from tuner.secrets import secret_values
from tuner.tracking.content import RunContent, front_tags, revision, trial_content
from tuner.tracking.evidence import stage_files
from tuner.tracking.registry import Registered, register
from tuner.tracking.series import trial_series
from tuner.tracking.store import Store, StoredRun
from tuner.tracking.summary import HYPERVOLUME, SUMMARY, experiment_note, stage_summary, summary_points, summary_tags
from tuner.tracking.verified import verification_content
from tuner.tracking.views import view_tags
from tuner.view import Objective, StudyView, view

REVISION = "revision"
STUDY_ID = "study_id"
"""Tag of the experiment: which of the studies of this name it belongs to."""
LOCK_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What one sync did.

    Parameters
    ----------
    written:
        Trials that were brought up to date.
    behind:
        Trials that the time did not suffice for; the next sync goes on with them.
    experiment_id:
        Of the study's experiment; `None` for a history without a header.
    """

    written: int
    behind: int
    experiment_id: str | None
    seconds: float


@dataclass(slots=True)
class _Known:
    """What the store has: the experiment, and its runs by trial number or `SUMMARY`."""

    experiment_id: str
    study_id: str
    runs: dict[str, StoredRun] = field(default_factory=dict)


class Tracker:
    """Writes one study into one experiment.

    Parameters
    ----------
    objectives:
        Of the study, in its order.
    uri, artifact_root:
        See `Store`.
    experiment:
        Name of the experiment; the study's own when left out.
    summary_every_s:
        The figures of the summary run are drawn again at most this often, and at the end.
    lock_wait_s:
        How long a sync waits for another process that syncs the same study.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        *,
        uri: str,
        artifact_root: Path,
        experiment: str | None = None,
        summary_every_s: float = 600.0,
        lock_wait_s: float = 30.0,
    ) -> None:
        self.objectives = tuple(objectives)
        self.experiment = experiment
        self.summary_every_s = summary_every_s
        self.lock_wait_s = lock_wait_s
        self._store = Store(uri, artifact_root)
        self._known: _Known | None = None
        self._summary_at: float | None = None

    def sync(
        self, history: History, folder: Path, *, budget_s: float | None = None, live: bool = True, final: bool = False
    ) -> SyncResult:
        """Bring the store up to date.

        Parameters
        ----------
        folder:
            Of the study, with `trials/N/`.
        budget_s:
            Begin no further trial after this many seconds; `None` for no limit.
        live:
            Whether the study runs: only then may a run be open. Otherwise runs of trials that never ended are closed.
        final:
            Look at the store afresh and draw the figures now.

        Raises
        ------
        StoreError
            When MLflow or the file system refuses, or another process syncs this study.
        """
        started = time.monotonic()
        if history.header is None:
            return SyncResult(0, 0, None, 0.0)
        try:
            with _alone(folder, self.lock_wait_s):
                known = self._connect(history.header, afresh=final)
                study = view(history, self.objectives)
                stale = [t for t in study.trials if not _is_current(known.runs.get(str(t.number)), t, live)]
                written = 0
                for trial in stale:
                    if budget_s is not None and time.monotonic() - started > budget_s:
                        break
                    self._write_trial(known, study, trial, folder / "trials" / str(trial.number), live)
                    written += 1
                self._move_front(known, study)
                self._write_verifications(known, study)
                if written == len(stale) and self._summary_due(final):
                    self._write_summary(known, study, folder)
        except Exception:
            # What was under way may or may not have arrived: the next sync asks the store.
            self._known = None
            raise
        return SyncResult(written, len(stale) - written, known.experiment_id, time.monotonic() - started)

    def register(self, deployed: Deployment) -> Registered:
        """Make a deployment the champion of its registered model, after a sync that brought its trial's run here.

        Raises
        ------
        StoreError
            When MLflow refuses, or has no run of the trial.
        """
        stored = self._known.runs.get(str(deployed.trial)) if self._known else None
        if stored is None:
            raise StoreError(f"trial {deployed.trial} has no run in MLflow yet; `tuner track` brings it there")
        with _staging() as staged:
            return register(self._store, stored.run_id, deployed, staged)

    def _connect(self, header: StudyHeader, *, afresh: bool) -> _Known:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.created_at))
        study_id = f"{header.study}, begun {began}"
        if self._known is None or self._known.study_id != study_id or afresh:
            experiment_id = self._experiment(header, study_id)
            self._known = _Known(experiment_id, study_id)
            for run in self._store.runs(experiment_id):
                if run.tags.get("study") == header.study:
                    self._remember(self._known, run)
        return self._known

    def _experiment(self, header: StudyHeader, study_id: str) -> str:
        """Id of the study's experiment, whatever someone has renamed it to.

        A new one takes the name over from an earlier study, whose experiment is renamed and kept; one that is not from
        here is used as it is.
        """
        known = self._store.tagged_experiment(STUDY_ID, study_id)
        if known is not None:
            return known
        name = self.experiment or header.study
        # The kind keeps the UI from guessing that this is about language model applications, and opening on traces.
        tags = {STUDY_ID: study_id, "mlflow.experimentKind": "custom_model_development"}
        found = self._store.experiment(name)
        if found is not None:
            experiment_id, found_tags = found
            if STUDY_ID not in found_tags:
                self._store.tag_experiment(experiment_id, tags)
                return experiment_id
            self._store.rename_experiment(experiment_id, f"{name} ({found_tags[STUDY_ID]})")
        return self._store.create_experiment(name, tags)

    def _remember(self, known: _Known, run: StoredRun) -> None:
        key = run.tags.get("trial") or (SUMMARY if run.tags.get(SUMMARY) else None)
        if key is None:
            return
        if key in known.runs:
            self._store.delete_run(run.run_id)
        else:
            known.runs[key] = run

    def _write_trial(self, known: _Known, study: StudyView, trial: TrialRecord, folder: Path, live: bool) -> None:
        """Write one trial; the revision goes in last, so that whatever breaks in between is written again."""
        content = trial_content(study, trial)
        run_id = self._run_for(known, trial, content)
        self._store.log(run_id, (*content.metrics, *trial_series(folder, trial.started_at)), content.params)
        secrets = secret_values() + secret_values(trial.config.env)
        with _staging() as staged:
            stage_files(staged, folder, content.documents, trial.failure, secrets)
            self._store.add_files(run_id, staged)
        tags = {**content.tags, REVISION: revision(trial)}
        self._store.tag(run_id, tags)
        status = content.status if live or content.status != "RUNNING" else "KILLED"
        self._store.set_status(run_id, status, content.ended_ms)
        known.runs[str(trial.number)] = StoredRun(run_id, status, tags)

    def _run_for(self, known: _Known, trial: TrialRecord, content: RunContent) -> str:
        """Return the run to write into: the one that is there, unless it says something else already, or a new one."""
        stored = known.runs.pop(str(trial.number), None)
        if stored is not None and not _must_be_replaced(stored, trial):
            return stored.run_id
        if stored is not None:
            self._store.delete_run(stored.run_id)
        return self._store.create_run(known.experiment_id, content.name, content.tags, content.started_ms)

    def _move_front(self, known: _Known, study: StudyView) -> None:
        """Set `pareto`, `knee`, `in_doubt` and `verified` where they changed."""
        for trial in study.trials:
            stored = known.runs.get(str(trial.number))
            if stored is None:
                continue
            wanted = front_tags(study, trial.number)
            changed = {name: value for name, value in wanted.items() if stored.tags.get(name) != value}
            if changed:
                self._store.tag(stored.run_id, changed)
                known.runs[str(trial.number)] = replace(stored, tags={**stored.tags, **changed})

    def _write_verifications(self, known: _Known, study: StudyView) -> None:
        """Write what verifications said into the runs of their trials; the revision goes in last."""
        for number in sorted({v.number for v in study.verifications}):
            stored, content = known.runs.get(str(number)), verification_content(study, number)
            if stored is None or content.tags.items() <= stored.tags.items():
                continue
            self._store.log(stored.run_id, content.metrics)
            with _staging() as staged:
                (staged / content.file).write_text(content.text, encoding="utf-8")
                self._store.add_files(stored.run_id, staged)
            self._store.tag(stored.run_id, content.tags)
            known.runs[str(number)] = replace(stored, tags={**stored.tags, **content.tags})

    def _summary_due(self, final: bool) -> bool:
        return final or self._summary_at is None or time.monotonic() - self._summary_at > self.summary_every_s

    def _write_summary(self, known: _Known, study: StudyView, folder: Path) -> None:
        """Write the run of figures and verdict, and the experiment's note, unless they are up to date."""
        drawn_from = _summary_revision(study)
        stored = known.runs.get(SUMMARY)
        if stored is not None and stored.tags.get(REVISION) == drawn_from:
            return
        tags = summary_tags(study)
        if stored is None:
            # A moment before the first trial, so that it leads the table that is sorted by time.
            began_ms = round(study.started_at * 1000) - 1
            run_id = self._store.create_run(known.experiment_id, SUMMARY, tags, began_ms)
        else:
            run_id = stored.run_id
        self._store.log(run_id, summary_points(study, after_step=self._store.last_step(run_id, HYPERVOLUME)))
        links = {int(key): run.run_id for key, run in known.runs.items() if key != SUMMARY}
        with _staging() as staged:
            stage_summary(staged, study, folder, known.experiment_id, links)
            self._store.add_files(run_id, staged)
        note = experiment_note(study, known.experiment_id, run_id)
        self._store.tag_experiment(known.experiment_id, {"mlflow.note.content": note, **view_tags(study)})
        tags |= {"mlflow.note.content": note, REVISION: drawn_from}
        self._store.tag(run_id, tags)
        self._store.set_status(run_id, "FINISHED", None)
        known.runs[SUMMARY] = StoredRun(run_id, "FINISHED", tags)
        self._summary_at = time.monotonic()


def _is_current(stored: StoredRun | None, trial: TrialRecord, live: bool) -> bool:
    if stored is None:
        return False
    open_run = stored.status == "RUNNING"
    may_be_open = live and trial.state is TrialState.RUNNING
    return stored.tags.get(REVISION) == revision(trial) and open_run == may_be_open


def _must_be_replaced(stored: StoredRun, trial: TrialRecord) -> bool:
    """Whether a run says something else already: params of a run cannot be changed, nor metrics taken back."""
    if stored.tags.get("config") != trial.config.key():
        return True
    finished = stored.tags.get("state") != TrialState.RUNNING.value
    return finished and stored.tags.get(REVISION) not in (None, revision(trial))


def _summary_revision(study: StudyView) -> str:
    parts = [revision(t) for t in study.trials if t.state is not TrialState.RUNNING]
    parts += [repr(study.front), repr(study.verifications), repr(study.notes)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _staging() -> Iterator[Path]:
    """Give a folder to gather a run's files in."""
    try:
        with tempfile.TemporaryDirectory(prefix="tuner-track-") as staged:
            yield Path(staged)
    except OSError as error:
        raise StoreError(
            f"{tempfile.gettempdir()}: files for MLflow cannot be gathered here ({error.strerror}); free or mend it"
        ) from error


@contextmanager
def _alone(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the study's tracking lock, so that `tuner run` and `tuner track` do not both make a run for one trial."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "tracking.lock").open("w")
    except OSError as error:
        raise StoreError(
            f"{folder}: the tracking lock cannot be written ({error.strerror}); mend the folder"
        ) from error
    until = time.monotonic() + wait_s
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise StoreError(f"{folder}: another process brings MLflow up to date; wait for its end") from error
                time.sleep(LOCK_POLL_S)
        yield
