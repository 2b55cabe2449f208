"""Stores that are locked, read-only, full or silent while a study runs: nothing lost, nothing twice, nobody waits.

The study is the sample one, a trial every second: its ledger is written, then the tracking is woken, as in the loop.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_samples import sample_history, write_study

from tuner.ledger import Ledger, TrialLine, TrialRecord, TrialState
from tuner.tracking import BackgroundTracker, Tracker
from tuner.tracking.store import Store
from tuner.view import Objective, view

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
LOCKED_S = 60.0
LONGEST_WAIT_S = 2.0
PATIENCE_S = 90.0

LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
connection.execute("ROLLBACK")
"""


class Night:
    """A study that goes on whatever its MLflow does, and what it waited for it."""

    def __init__(self, root: Path, trials: int, *, uri: str | None = None, store: Path | None = None) -> None:
        self.store = store or root
        self.uri = uri or f"sqlite:///{self.store / 'mlflow.db'}"
        self.artifacts = self.store / "artifacts"
        self.folder = root / "studies" / "longdoc"
        self.history = sample_history(trials, running=False)
        self.ledger = Ledger(self.folder / "ledger.jsonl")
        self.told: list[str] = []
        self.waited_s: list[float] = []
        tracker = Tracker(OBJECTIVES, uri=self.uri, artifact_root=self.artifacts)
        self.background = BackgroundTracker(
            tracker, self.ledger.history, self.folder, self.told.append, first_retry_s=1.0
        )
        write_study(root / "finished", self.history)
        assert self.history.header is not None
        self.ledger.append(self.history.header)

    def run(self, trials: int, every_s: float = 1.0) -> None:
        """Run so many further trials; each is begun and finished in the ledger, and MLflow is told of both."""
        first = len(self.waited_s) // 2
        for trial in self.history.trials[first : first + trials]:
            self._write(begun(trial), every_s / 2)
            made = self.folder.parents[1] / "finished" / "trials" / str(trial.number)
            if made.exists():
                shutil.copytree(made, self.folder / "trials" / str(trial.number))
            self._write(trial, every_s / 2)

    def _write(self, trial: TrialRecord, pause_s: float) -> None:
        started = time.monotonic()
        self.ledger.append(TrialLine(trial))
        self.background.wake()
        self.waited_s.append(time.monotonic() - started)
        time.sleep(pause_s)

    def runs(self) -> list[Any]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name("longdoc")
        return list(client.search_runs([found.experiment_id], max_results=1000))

    def assert_whole(self) -> None:
        """Every trial of the study is in MLflow once, with its tables, and the front is the study's."""
        runs = self.runs()
        trials = {int(run.data.tags["trial"]): run for run in runs if "trial" in run.data.tags}
        front = {number for number, run in trials.items() if run.data.tags["pareto"] == "true"}
        assert len(runs) == len(self.history.trials) + 1
        assert sorted(trials) == [trial.number for trial in self.history.trials]
        assert front == set(view(self.history, OBJECTIVES).front)
        assert not [run for run in runs if run.info.status == "RUNNING"]
        for trial in self.history.trials:
            folder = self.artifacts / "longdoc" / trials[trial.number].info.run_id / "artifacts"
            assert (folder / "trial.json").exists()
            assert (folder / "requests.parquet").exists() == (trial.score is not None)


def begun(trial: TrialRecord) -> TrialRecord:
    """The record as it was written when the trial began."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("finished_at", "score", "failure", "engine", "speed_before", "speed_after")
    )
    return replace(trial, state=TrialState.RUNNING, engine_s=0.0, **unknown)


def wait_for(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def tables(folder: Path) -> None:
    """MLflow takes seconds to make its tables; every test gets them before its fault begins."""
    Store(f"sqlite:///{folder / 'mlflow.db'}", folder).experiment("none")


class LockedNight(threading.Thread):
    """A night whose store another process locks for a minute, on a thread, so that the other tests run meanwhile."""

    def __init__(self, root: Path) -> None:
        super().__init__(name="locked night", daemon=True)
        tables(root)
        self.night = Night(root, 24)
        self.night.run(2)
        self.lock = subprocess.Popen(
            [sys.executable, "-c", LOCK, str(root / "mlflow.db"), str(LOCKED_S)], stdout=subprocess.PIPE, text=True
        )
        assert self.lock.stdout is not None
        assert self.lock.stdout.readline() == "locked\n"
        self.start()

    def run(self) -> None:
        self.night.run(20, every_s=LOCKED_S / 20)
        assert self.lock.wait(LOCKED_S) == 0
        self.night.run(2)


@pytest.fixture(scope="module", autouse=True)
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedNight]:
    running = LockedNight(tmp_path_factory.mktemp("locked"))
    yield running
    running.lock.kill()
    running.lock.communicate()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Take the right to write a folder away; from root too, whom mode bits do not stop."""
    if os.geteuid() != 0:
        mode = folder.stat().st_mode
        folder.chmod(0o555)
        yield
        folder.chmod(mode)
        return
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", folder], check=False).returncode:
        pytest.skip("root may write everything here, and the file system knows no immutable folders")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """Mount a disk of 3 MB; what is yielded makes room on it."""
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    grow = ["mount", "-o", "remount,size=300m", str(folder)]
    try:
        yield lambda: subprocess.run(grow, check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_an_artifact_folder_that_is_read_only_for_a_while(tmp_path: Path) -> None:
    tables(tmp_path)
    night = Night(tmp_path, 12)
    night.run(3)
    assert wait_for((night.artifacts / "longdoc").exists)
    with read_only(night.artifacts / "longdoc"):
        night.run(6)
        assert wait_for(lambda: bool(night.told))
    night.run(3)

    assert night.background.close(PATIENCE_S)
    night.assert_whole()
    assert max(night.waited_s) < LONGEST_WAIT_S
    assert "nothing is lost" in night.told[0]


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as make_room:
        tables(tmp_path / "disk")
        night = Night(tmp_path, 12, store=tmp_path / "disk")
        night.run(9)
        assert wait_for(lambda: bool(night.told))
        make_room()
        night.run(3)

        assert night.background.close(PATIENCE_S)
        night.assert_whole()
        assert max(night.waited_s) < LONGEST_WAIT_S
        assert "nothing is lost" in night.told[0]


def test_a_server_that_takes_calls_and_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        night = Night(tmp_path, 4, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        night.run(4)
        started = time.monotonic()
        closed = night.background.close(1.0)

        assert not closed
        assert time.monotonic() - started < 1.0 + LONGEST_WAIT_S
        assert max(night.waited_s) < LONGEST_WAIT_S
        assert wait_for(lambda: len(night.told) == 1)


def test_a_store_that_another_process_locks_for_a_minute(locked: LockedNight) -> None:
    locked.join(2 * LOCKED_S)
    night = locked.night

    assert not locked.is_alive()
    assert night.background.close(PATIENCE_S)
    night.assert_whole()
    assert max(night.waited_s) < LONGEST_WAIT_S
    assert len(night.told) == 2
    assert "locked" in night.told[0]
    assert night.told[1] == "MLflow takes runs again and is up to date."
