"""A tracking server as docker/compose.yaml defines it takes a whole study; one that dies on the way loses nothing."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import user_environment
from mlflow_server import PATIENCE_S, Server, wait_for
from postgres_server import Postgres, binaries
from study_samples import sample_history, write_study

from tuner.export.deployment import deployment
from tuner.ledger import History, TrialState
from tuner.proposer import Proposer
from tuner.space import Parameter
from tuner.spec import Search
from tuner.tracking import BackgroundTracker, Tracker
from tuner.tracking.server import free_port
from tuner.view import Objective, view

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]

DOCKER = Path(__file__).parents[2] / "docker"
OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
PASSWORD = "a:b/c@d %e"
"""With everything that would have to be escaped in an address."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    folder = binaries()
    if folder is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    server = Postgres(folder, PASSWORD)
    try:
        server.start()
        yield server
    finally:
        server.remove()


def compose_server(root: Path, postgres: Postgres) -> Server:
    """The MLflow service of compose.yaml without its container: its own command with the addresses of this machine."""
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["mlflow"]
    port = free_port()
    here = {
        "0.0.0.0": "127.0.0.1",
        "--port=5000": f"--port={port}",
        "postgres:5432": postgres.address,
        "=/artifacts": f"={root / 'artifacts'}",
    }
    words = [sys.executable, "-m", *service["command"]]
    for there, instead in here.items():
        assert any(there in word for word in words)
        words = [word.replace(there, instead) for word in words]
    (root / "password").write_text(f"{PASSWORD}\n")
    env = service["environment"] | {"PGPASSWORD_FILE": str(root / "password")}
    return Server(root, port, [str(DOCKER / "with-password"), *words], env)


@pytest.fixture(scope="module")
def compose(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    postgres.create_database("mlflow")
    server = compose_server(tmp_path_factory.mktemp("compose"), postgres)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_the_composed_server_takes_a_whole_study_and_gives_a_tidy_table(compose: Server, tmp_path: Path) -> None:
    import mlflow

    history = sample_history(running=False)
    folder = tmp_path / "studies" / "longdoc"
    write_study(folder, history)
    tracker = Tracker(OBJECTIVES, uri=compose.uri, artifact_root=tmp_path / "unused")

    done = tracker.sync(history, folder, live=False, final=True)
    again = Tracker(OBJECTIVES, uri=compose.uri, artifact_root=tmp_path / "unused").sync(history, folder, live=False)

    mlflow.set_tracking_uri(compose.uri)
    table = mlflow.search_runs(experiment_names=["longdoc"])
    trials = table[table["tags.summary"].isna()].set_index("tags.trial")
    study = view(history, OBJECTIVES)
    assert (done.written, done.behind, again.written) == (len(history.trials), 0, 0)
    assert sorted(map(int, trials.index)) == list(range(len(history.trials)))
    assert {int(n) for n in trials.index[trials["tags.pareto"] == "true"]} == set(study.front)
    assert set(trials["status"]) == {"FINISHED", "FAILED"}
    for trial in history.trials:
        row = trials.loc[str(trial.number)]
        assert row["tags.state"] == trial.state.value
        if trial.state is TrialState.COMPLETE:
            assert trial.score is not None
            assert math.isclose(row["metrics.ttft_p95_s"], trial.score.values["ttft_p95_s"])
            assert row["params.max_num_seqs"] == str(trial.params["max_num_seqs"])
    assert not (tmp_path / "unused").exists()
    assert list((compose.root / "artifacts").rglob("report.html"))
    assert PASSWORD not in compose.log()


def test_the_composed_server_answers_to_its_own_names_only(compose: Server) -> None:
    path = "/api/2.0/mlflow/experiments/get?experiment_id=0"
    assert compose.answer(path, "mlflow:5000") == 200
    assert compose.answer(path) == 200
    assert compose.answer(path, "elsewhere.example") == 403


def test_a_database_that_goes_away_and_comes_back_costs_the_study_nothing(
    compose: Server, postgres: Postgres, tmp_path: Path
) -> None:
    folder = tmp_path / "studies" / "outage"
    seen: list[History] = [named(sample_history(3, running=False), "outage")]
    told: list[str] = []
    tracker = Tracker(OBJECTIVES, uri=compose.uri, artifact_root=tmp_path / "unused")
    background = BackgroundTracker(tracker, lambda: seen[0], folder, told.append, first_retry_s=0.5)

    postgres.stop()
    background.wake()
    assert wait_for(lambda: bool(told))
    seen[0] = named(sample_history(8, running=False), "outage")
    background.wake()
    postgres.start()

    assert wait_for(lambda: len(told) == 2)
    assert background.close(PATIENCE_S)
    assert trials_of(compose, "outage") == list(range(8))


def test_optuna_keeps_a_study_in_postgresql(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres.create_database("optuna")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    url = f"postgresql://tuner@{postgres.address}/optuna"
    space = {"max_num_seqs": Parameter(choices=(1, 2, 4)), "max_num_batched_tokens": Parameter(low=64, high=512)}

    def proposer() -> Proposer:
        options = Search(sampler="random", startup_trials=1)
        return Proposer(url, "night", space, options, constraints=[], objectives=[(True, 1), (True, 1)])

    first = proposer()
    first.enqueue("reference", {}, {"max_num_seqs": 4, "max_num_batched_tokens": 512})
    asked = [first.ask() for _ in range(3)]
    first.tell_measured(0, [2.0, 0.05], {"memory": -0.2})
    first.tell_violation(1, 0.4)
    resumed = proposer()

    assert [p.number for p in asked] == [0, 1, 2]
    assert [p.number for p in resumed.open_trials()] == [2]
    assert resumed.ask().number == 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """MLflow on SQLite."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "store")]
    server = Server(tmp_path, port, command, {})
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_a_deployment_asks_the_server_for_the_champion(server: Server, tmp_path: Path) -> None:
    history = sample_history(3, running=False)
    folder = tmp_path / "studies" / "longdoc"
    write_study(folder, history, tables=False)
    study = view(history, OBJECTIVES)
    tracker = Tracker(OBJECTIVES, uri=server.uri, artifact_root=tmp_path / "unused")
    tracker.sync(history, folder, live=False)
    for number in (1, 2, 1):
        done = tracker.register(deployment(study, study.trial(number), defaults={}))

    command = [sys.executable, "-m", "mlflow", "artifacts", "download", "-u", done.uri, "-d", str(tmp_path / "deploy")]
    env = {**user_environment(), "MLFLOW_TRACKING_URI": server.uri}
    asked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    assert asked.returncode == 0, asked.stderr
    arguments = yaml.safe_load((tmp_path / "deploy" / "vllm.yaml").read_text())
    assert (done.version, done.created) == ("1", False)
    assert arguments["max-num-seqs"] == history.trials[1].params["max_num_seqs"]


def test_a_server_killed_in_the_middle_has_every_trial_once_in_the_end(server: Server, tmp_path: Path) -> None:
    whole = sample_history(16, running=False)
    folder = tmp_path / "studies" / "longdoc"
    write_study(folder, whole)
    seen: list[History] = [sample_history(6, running=False)]
    told: list[str] = []
    waited: list[float] = []
    tracker = Tracker(OBJECTIVES, uri=server.uri, artifact_root=tmp_path / "unused")
    background = BackgroundTracker(tracker, lambda: seen[0], folder, told.append, first_retry_s=0.5)

    background.wake()
    time.sleep(2.0)
    server.kill()
    for trials in range(7, 17):
        seen[0] = sample_history(trials, running=False)
        started = time.monotonic()
        background.wake()
        waited.append(time.monotonic() - started)
    assert wait_for(lambda: bool(told))
    server.start()
    assert wait_for(lambda: len(told) == 2)
    assert background.close(PATIENCE_S)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    experiment = client.get_experiment_by_name("longdoc")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    front = {int(run.data.tags["trial"]) for run in runs if run.data.tags.get("pareto") == "true"}
    assert trials_of(server, "longdoc") == list(range(16))
    assert front == set(view(whole, OBJECTIVES).front)
    assert not [run for run in runs if run.info.status == "RUNNING"]
    assert max(waited) < 0.1
    assert "nothing is lost" in told[0]
    assert told[1] == "MLflow takes runs again and is up to date."
    (summary,) = [run for run in runs if "summary" in run.data.tags]
    names = {item.path for item in client.list_artifacts(summary.info.run_id, "figures")}
    assert "figures/front.html" in names


def trials_of(server: Server, experiment: str) -> list[int]:
    """Numbers of the trials that have a run, each as often as it has one."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id], max_results=1000)
    return sorted(int(run.data.tags["trial"]) for run in runs if "trial" in run.data.tags)


def named(history: History, study: str) -> History:
    assert history.header is not None
    return replace(history, header=replace(history.header, study=study))
