"""A tracking server that dies in the middle of a study and comes back: nothing lost, nothing twice, nobody waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study_samples import sample_history, write_study

from tuner.ledger import History
from tuner.tracking import BackgroundTracker, Tracker
from tuner.tracking.server import free_port
from tuner.view import Objective, view

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
PATIENCE_S = 90.0


class Server:
    """MLflow with its own database and artefact store, reached over HTTP only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.root / 'server.db'}"]
        command += ["--serve-artifacts", "--artifacts-destination", str(self.root / "store")]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.root / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=self.root, start_new_session=True
            )
        assert wait_for(self.is_up), (self.root / "server.log").read_text()[-2000:]

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 9)
            self.process.wait(timeout=30)
            self.process = None

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def wait_for(condition: Any) -> bool:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.1)
    return False


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
    trials = sorted(int(run.data.tags["trial"]) for run in runs if "trial" in run.data.tags)
    front = {int(run.data.tags["trial"]) for run in runs if run.data.tags.get("pareto") == "true"}
    assert trials == list(range(16))
    assert front == set(view(whole, OBJECTIVES).front)
    assert not [run for run in runs if run.info.status == "RUNNING"]
    assert max(waited) < 0.1
    assert "nothing is lost" in told[0]
    assert told[1] == "MLflow takes runs again and is up to date."
    (summary,) = [run for run in runs if "summary" in run.data.tags]
    names = {item.path for item in client.list_artifacts(summary.info.run_id, "figures")}
    assert "figures/front.html" in names
