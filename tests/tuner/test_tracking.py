from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_samples import sample_history, write_study

from tuner.errors import StoreError, UsageError
from tuner.ledger import History, TrialState
from tuner.tracking import BackgroundTracker, Tracker, experiment_url, ui_command
from tuner.tracking.series import MOST_POINTS
from tuner.tracking.store import Store
from tuner.view import Objective, view

# MLflow calls what SQLAlchemy has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
HISTORY = sample_history(16)


class Place:
    """A store and a study folder of one test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = f"sqlite:///{root / 'mlflow.db'}"
        self.folder = root / "studies" / "longdoc"

    def tracker(self, **options: Any) -> Tracker:
        return Tracker(OBJECTIVES, uri=self.uri, artifact_root=self.root / "artifacts", **options)

    def runs(self, filter_text: str = "", experiment: str = "longdoc") -> list[Any]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(experiment)
        return list(client.search_runs([found.experiment_id], filter_text, max_results=1000))

    def trial(self, number: int) -> Any:
        (run,) = self.runs(f"tags.trial = '{number}'")
        return run

    def files(self, run: Any) -> set[str]:
        folder = Path(run.info.artifact_uri.removeprefix("file://"))
        return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def place(tmp_path: Path, empty_database: Path) -> Place:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return Place(tmp_path)


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Place:
    """A whole study in the store, for tests that only read."""
    root = tmp_path_factory.mktemp("synced")
    shutil.copy(empty_database, root / "mlflow.db")
    place = Place(root)
    write_study(place.folder, HISTORY)
    place.tracker().sync(HISTORY, place.folder)
    return place


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of the summary out where a test is about trials: they take seconds."""
    monkeypatch.setattr("tuner.tracking.summary.write_figures", lambda *_: [])
    monkeypatch.setattr("tuner.tracking.summary.report_page", lambda *_: "")


def test_every_trial_is_one_flat_run_and_one_more_is_the_summary(synced: Place) -> None:
    runs = synced.runs()
    assert len(runs) == len(HISTORY.trials) + 1
    assert not [run for run in runs if "mlflow.parentRunId" in run.data.tags]


def test_filters_of_the_documentation_work(synced: Place) -> None:
    study = view(HISTORY, OBJECTIVES)
    assert {int(r.data.tags["trial"]) for r in synced.runs("tags.pareto = 'true'")} == set(study.front)
    assert [int(r.data.tags["trial"]) for r in synced.runs("tags.knee = 'true'")] == [study.knee]
    assert [r.data.tags["trial"] for r in synced.runs("tags.reference = 'true'")] == ["0"]
    assert len(synced.runs("tags.failure.kind = 'oom_kv_cache'")) == 2
    assert len(synced.runs("tags.state = 'infeasible'")) == 3
    assert synced.runs("metrics.ttft_p95_s < 3 and metrics.ttft_p95_s.high < 4")
    assert synced.runs("params.max_num_seqs = '16'")


def test_states_show_in_the_list(synced: Place) -> None:
    status = {
        int(r.data.tags["trial"]): r.info.status for r in synced.runs("tags.state != ''") if "trial" in r.data.tags
    }
    assert (status[0], status[6], status[12], status[15]) == ("FINISHED", "FAILED", "FAILED", "RUNNING")


def test_tables_configuration_and_log_are_files_of_the_run(synced: Place) -> None:
    tables = {"requests.parquet", "steps.parquet", "device.parquet"}
    assert synced.files(synced.trial(1)) == tables | {"config.json", "trial.json", "score.json"}
    assert synced.files(synced.trial(6)) == {"config.json", "trial.json", "engine.log"}


def test_device_series_have_steps(synced: Place) -> None:
    from mlflow.tracking import MlflowClient

    history = MlflowClient(tracking_uri=synced.uri).get_metric_history(
        synced.trial(1).info.run_id, "gpu0/memory_used_gib"
    )
    assert 30 <= len(history) <= MOST_POINTS


def test_the_summary_holds_figures_report_and_verdict(synced: Place) -> None:
    (summary,) = synced.runs("tags.summary = 'true'")
    files = synced.files(summary)
    assert {"report.html", "front.json", "figures/front.html", "figures/front.png"} <= files
    assert summary.info.status == "FINISHED"
    assert summary.data.metrics["hypervolume"] >= 1.0
    assert "tags.pareto = 'true'" in summary.data.tags["mlflow.note.content"]


def test_the_experiment_carries_the_verdict_as_its_note(synced: Place) -> None:
    from mlflow.tracking import MlflowClient

    experiment = MlflowClient(tracking_uri=synced.uri).get_experiment_by_name("longdoc")
    (summary,) = synced.runs("tags.summary = 'true'")
    assert experiment.tags["mlflow.note.content"] == summary.data.tags["mlflow.note.content"]
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_mlflows_own_table_is_tidy(synced: Place) -> None:
    import mlflow

    mlflow.set_tracking_uri(synced.uri)
    table = mlflow.search_runs(experiment_names=["longdoc"], filter_string="tags.state = 'complete'")
    assert len(table) == sum(t.state is TrialState.COMPLETE for t in HISTORY.trials)
    assert table["metrics.ttft_p95_s"].notna().all()


def test_a_second_sync_writes_nothing(synced: Place) -> None:
    before = [(r.info.run_id, r.data.metrics) for r in synced.runs()]
    assert synced.tracker().sync(HISTORY, synced.folder).written == 0
    assert [(r.info.run_id, r.data.metrics) for r in synced.runs()] == before


@pytest.mark.usefixtures("no_figures")
def test_a_running_trial_becomes_the_finished_one(place: Place) -> None:
    tracker = place.tracker()
    finished = sample_history(3, running=False)
    tracker.sync(sample_history(3), place.folder)
    opened = place.trial(2).info.run_id
    tracker.sync(finished, place.folder)
    run = place.trial(2)
    assert (run.info.run_id, run.info.status, run.data.tags["state"]) == (opened, "FINISHED", "complete")


@pytest.mark.usefixtures("no_figures")
def test_front_tags_follow_the_front(place: Place) -> None:
    tracker = place.tracker()
    for trials in (4, 10, 16):
        history = sample_history(trials)
        tracker.sync(history, place.folder)
        front = {int(r.data.tags["trial"]) for r in place.runs("tags.pareto = 'true'")}
        assert front == set(view(history, OBJECTIVES).front)
        assert len(place.runs("tags.knee = 'true'")) == 1


@pytest.mark.usefixtures("no_figures")
def test_a_run_left_open_by_a_crash_is_closed_when_the_study_is_not_running(place: Place) -> None:
    place.tracker().sync(sample_history(3), place.folder)
    place.tracker().sync(sample_history(3), place.folder, live=False)
    assert place.trial(2).info.status == "KILLED"
    place.tracker().sync(sample_history(3), place.folder)
    assert place.trial(2).info.status == "RUNNING"


@pytest.mark.usefixtures("no_figures")
def test_a_trial_that_broke_off_half_written_is_finished_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    history = sample_history(3, running=False)
    write_study(place.folder, history)
    tracker = place.tracker()

    def refuse(*_: object) -> None:
        raise StoreError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "add_files", refuse)
        with pytest.raises(StoreError):
            tracker.sync(history, place.folder)
    tracker.sync(history, place.folder)
    assert len(place.runs("tags.trial = '0'")) == 1
    assert "requests.parquet" in place.files(place.trial(0))


@pytest.mark.usefixtures("no_figures")
def test_a_run_that_is_there_twice_is_removed(place: Place) -> None:
    history = sample_history(3, running=False)
    tracker = place.tracker()
    experiment_id = tracker.sync(history, place.folder).experiment_id
    assert experiment_id is not None
    Store(place.uri, place.root).create_run(
        experiment_id, "trial 001", {"study": "longdoc", "trial": "1"}, 2_000_000_000_000
    )
    tracker.sync(history, place.folder, final=True)
    assert place.trial(1).data.metrics


@pytest.mark.usefixtures("no_figures")
def test_a_record_that_changed_replaces_its_run(place: Place) -> None:
    history = sample_history(3, running=False)
    tracker = place.tracker()
    tracker.sync(history, place.folder)
    changed = replace(history.trials[1], config=history.trials[1].config.with_args({"max_num_seqs": 7}))
    tracker.sync(replace(history, trials=(history.trials[0], changed, history.trials[2])), place.folder)
    assert place.trial(1).data.tags["config"] == changed.config.key()


@pytest.mark.usefixtures("no_figures")
def test_a_study_begun_afresh_gets_an_experiment_of_its_own(place: Place) -> None:
    history = sample_history(3, running=False)
    assert history.header is not None
    place.tracker().sync(history, place.folder)
    place.tracker().sync(replace(history, header=replace(history.header, created_at=1.8e9)), place.folder)
    assert len(place.runs()) == 4
    from mlflow.tracking import MlflowClient

    names = [e.name for e in MlflowClient(tracking_uri=place.uri).search_experiments()]
    assert sum(name.startswith("longdoc (longdoc, begun 2026-11-18") for name in names) == 1


@pytest.mark.usefixtures("no_figures")
def test_an_experiment_is_found_again_after_someone_renamed_it(place: Place) -> None:
    history = sample_history(3, running=False)
    experiment_id = place.tracker().sync(history, place.folder).experiment_id
    assert experiment_id is not None
    Store(place.uri, place.root).rename_experiment(experiment_id, "my favourite")
    assert place.tracker().sync(history, place.folder).experiment_id == experiment_id
    assert len(place.runs(experiment="my favourite")) == 4


@pytest.mark.usefixtures("no_figures")
def test_two_studies_that_want_one_name_keep_their_experiments_apart(place: Place) -> None:
    first = sample_history(3, running=False)
    assert first.header is not None
    second = replace(first, header=replace(first.header, study="other"))
    ids = [place.tracker(experiment="mine").sync(h, place.folder).experiment_id for h in (first, second, first, second)]
    assert ids[0] == ids[2] != ids[1] == ids[3]


@pytest.mark.usefixtures("no_figures")
def test_an_experiment_made_by_hand_is_used_and_its_own_runs_are_left_alone(place: Place) -> None:
    store = Store(place.uri, place.root / "artifacts")
    made = store.create_experiment("longdoc", {})
    for _ in range(2):
        store.create_run(made, "someone else's", {"trial": "1"}, 1_000)
    assert place.tracker().sync(sample_history(3, running=False), place.folder, final=True).experiment_id == made
    assert len(place.runs("tags.trial = '1'")) == 3


@pytest.mark.usefixtures("no_figures")
def test_a_budget_leaves_the_rest_for_later(place: Place) -> None:
    tracker = place.tracker()
    history = sample_history(3, running=False)
    first = tracker.sync(history, place.folder, budget_s=-1.0)
    assert (first.written, first.behind) == (0, 3)
    assert tracker.sync(history, place.folder).written == 3


@pytest.mark.usefixtures("no_figures")
def test_two_processes_do_not_sync_one_study_at_once(place: Place) -> None:
    from fcntl import LOCK_EX, flock

    place.folder.mkdir(parents=True)
    with (place.folder / "tracking.lock").open("w") as other:
        flock(other, LOCK_EX)
        with pytest.raises(StoreError, match="another process"):
            place.tracker(lock_wait_s=0.2).sync(HISTORY, place.folder)


def test_an_artifact_folder_that_cannot_be_written_is_told_and_made_good_later(place: Place, no_figures: None) -> None:
    history = sample_history(3, running=False)
    (place.root / "artifacts").write_text("a file where the folder should be")
    tracker = place.tracker()
    with pytest.raises(StoreError, match="nothing is lost"):
        tracker.sync(history, place.folder)
    (place.root / "artifacts").unlink()
    tracker.sync(history, place.folder)
    assert [len(place.runs(f"tags.trial = '{n}'")) for n in range(3)] == [1, 1, 1]
    assert "config.json" in place.files(place.trial(0))


def test_a_server_that_is_down_is_one_sentence_without_secrets(tmp_path: Path) -> None:
    tracker = Tracker(OBJECTIVES, uri="http://me:hunter22@127.0.0.1:9", artifact_root=tmp_path)
    with pytest.raises(StoreError, match="tuner track") as caught:
        tracker.sync(HISTORY, tmp_path)
    assert "hunter22" not in str(caught.value)


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.usefixtures("no_figures")
def test_the_study_never_waits_while_the_store_is_locked(place: Place) -> None:
    history: list[History] = [sample_history(2, running=False)]
    told: list[str] = []
    background = BackgroundTracker(place.tracker(), lambda: history[0], place.folder, told.append)
    background.wake()
    assert wait_for(lambda: (place.root / "artifacts").exists() and bool(place.runs("tags.summary = 'true'")))
    lock = sqlite3.connect(place.root / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    history[0] = sample_history(5, running=False)
    started = time.monotonic()
    background.wake()
    assert time.monotonic() - started < 0.05
    time.sleep(1.0)
    lock.execute("ROLLBACK")
    lock.close()
    assert background.close(timeout_s=30.0)
    assert len(place.runs()) == 6
    assert told == []


class Flaky:
    """Stands in for a tracker whose store is away for the first calls."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures = failures
        self.error = error
        self.calls = 0
        self.entered = threading.Event()

    def sync(self, *_: object, **__: object) -> None:
        self.calls += 1
        self.entered.set()
        if self.calls <= self.failures:
            raise self.error


@pytest.mark.parametrize("error", [StoreError("MLflow is away."), RuntimeError("a fault of ours")])
def test_an_outage_is_told_once_and_its_end_too(tmp_path: Path, error: Exception) -> None:
    told: list[str] = []
    flaky: Any = Flaky(3, error)
    background = BackgroundTracker(flaky, lambda: HISTORY, tmp_path, told.append, first_retry_s=0.01)
    background.wake()
    assert wait_for(lambda: len(told) == 2)
    assert str(error) in told[0]
    assert told[1] == "MLflow takes runs again and is up to date."
    assert background.close(5.0)


def test_closing_while_the_store_is_away_ends_in_time_and_says_so(tmp_path: Path) -> None:
    flaky: Any = Flaky(10_000, StoreError("MLflow is away."))
    background = BackgroundTracker(flaky, lambda: HISTORY, tmp_path, lambda _: None, first_retry_s=60.0)
    background.wake()
    assert flaky.entered.wait(5.0)
    started = time.monotonic()
    assert not background.close(2.0)
    assert time.monotonic() - started < 2.5


def test_the_ui_is_served_on_this_machine_with_one_worker(tmp_path: Path) -> None:
    server = ui_command("sqlite:////x/mlflow.db", tmp_path)
    with pytest.raises(UsageError, match="open that address"):
        ui_command("http://mlflow:5000", tmp_path)
    assert server.base_url.startswith("http://127.0.0.1:")
    assert server.command[server.command.index("--workers") + 1] == "1"
    assert server.env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert experiment_url(server.base_url, "7").startswith(f"{server.base_url}/#/experiments/7/runs?")


def test_sync_that_takes_long_is_not_followed_by_another_at_once(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.calls = 0
            self.first_is_over = threading.Event()

        def sync(self, *_: object, **__: object) -> None:
            self.calls += 1
            time.sleep(0.1)
            self.first_is_over.set()

    slow: Any = Slow()
    background = BackgroundTracker(slow, lambda: HISTORY, tmp_path, lambda _: None)
    background.wake()
    assert slow.first_is_over.wait(10)
    background.wake()
    time.sleep(0.05)

    assert slow.calls == 1
    assert background.close(timeout_s=10)
    assert slow.calls == 2
