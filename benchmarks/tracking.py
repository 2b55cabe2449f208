"""Seconds that tracking takes a trial, and that MLflow's UI takes to open the experiment, for a study of many trials.

    PYTHONPATH=. python benchmarks/tracking.py [--trials 500] [--folder DIR] [--no-ui]

Writes a made-up study (24 requests, 60 steps and 240 device readings a measured trial), tracks it trial by trial into
SQLite as a running study would, then loads the UI in chromium when chromium and playwright are installed. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.ledger import History
from tuner.tracking import Tracker, UiServer, default_artifact_root, default_uri, experiment_url, ui_command
from tuner.tracking.content import plain_metrics
from tuner.tracking.store import Store
from tuner.tracking.summary import run_link
from tuner.tracking.views import FRONT, view_link
from tuner.view import Objective

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="keep everything here (a fresh temporary folder when left out)")
    parser.add_argument("--no-ui", action="store_true", help="leave the browser out")
    options = parser.parse_args(arguments)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    with tempfile.TemporaryDirectory(prefix="tuner-benchmark-") as temporary:
        root = options.folder or Path(temporary)
        folder = root / "mlruns" / "studies" / "longdoc"
        history = write_sample(folder, options.trials)
        experiment_id = track(root, folder, history)
        if not options.no_ui:
            time_ui(root, experiment_id)


def write_sample(folder: Path, trials: int) -> History:
    """Write the tests' made-up study, with a value for every metric that tracking takes, and return its history."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "tuner"))
    from study_samples import sample_history, write_study

    history = sample_history(trials, running=False)
    generator = np.random.default_rng(0)
    filled = []
    for trial in history.trials:
        values = {name: float(generator.uniform()) for name in plain_metrics()}
        score = replace(trial.score, values={**values, **trial.score.values}) if trial.score else None
        filled.append(replace(trial, score=score))
    history = replace(history, trials=tuple(filled))
    write_study(folder, history)
    return history


def track(root: Path, folder: Path, history: History) -> str:
    """Sync after each trial, as a running study does, and print what that took."""
    tracker = Tracker(OBJECTIVES, uri=default_uri(root), artifact_root=default_artifact_root(root), summary_every_s=1e9)
    first_s = timed(lambda: tracker.sync(replace(history, trials=()), folder))
    seconds = []
    for count in range(1, len(history.trials) + 1):
        grown = replace(history, trials=history.trials[:count])
        seconds.append(timed(lambda grown=grown: tracker.sync(grown, folder)))
    print(f"first contact (makes the database, draws an empty summary): {first_s:.1f} s")
    print(describe("a trial, all of its metrics, series and files", seconds))
    print(describe("the last 50 of them", seconds[-50:]))
    print(f"summary with figures and report: {timed(lambda: tracker.sync(history, folder, final=True)):.1f} s")
    again = Tracker(OBJECTIVES, uri=default_uri(root), artifact_root=default_artifact_root(root))
    results = []
    print(f"another process, nothing to do: {timed(lambda: results.append(again.sync(history, folder))):.1f} s")
    database = root / "mlruns" / "mlflow.db"
    print(f"database: {database.stat().st_size / 2**20:.0f} MiB, metrics of a run: {metrics_of_a_run(root, results)}")
    return str(results[0].experiment_id)


def metrics_of_a_run(root: Path, results: list[Any]) -> int:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=default_uri(root))
    runs = client.search_runs([results[0].experiment_id], "tags.state = 'complete'", max_results=20)
    return max(len(run.data.metrics) for run in runs)


def time_ui(root: Path, experiment_id: str) -> None:
    """Start the server and time how long the browser takes to show what a reader looks at."""
    chromium = shutil.which("chromium")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        print("UI: left out, chromium or playwright is missing")
        return
    server = ui_command(default_uri(root), default_artifact_root(root))
    with (root / "server.log").open("w") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            server.command, env={**os.environ, **server.env}, stdout=log, stderr=subprocess.STDOUT, cwd=root
        )
        try:
            wait_until_up(server.base_url)
            print(f"UI server up: {time.monotonic() - started:.1f} s")
            load_pages(server, experiment_id, summary_run(root, experiment_id), chromium)
        finally:
            process.terminate()
            process.wait(timeout=30)


def load_pages(server: UiServer, experiment_id: str, summary: str, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    figure = run_link(experiment_id, summary, "figures/front.html")
    pages: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "list of experiments": (experiment_url(server.base_url), lambda p: p.get_by_role("link", name="longdoc")),
        "table of trials": (
            experiment_url(server.base_url, experiment_id),
            lambda p: p.get_by_text("matching runs"),
        ),
        "front in MLflow's charts": (
            f"{server.base_url}/{view_link(experiment_id, FRONT)}",
            lambda p: p.locator(".scatterlayer .point"),
        ),
        "interactive front": (
            f"{server.base_url}/{figure}",
            lambda p: p.frame_locator("iframe.mlflow-html-iframe").locator(".scatterlayer .point"),
        ),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (address, shown) in pages.items():
            seconds = []
            for _ in range(3):
                page = browser.new_page(viewport={"width": 1600, "height": 950})
                seconds.append(timed(lambda page=page, address=address, shown=shown: open_page(page, address, shown)))
                page.close()
            print(f"UI, {name}: first {seconds[0]:.1f} s, then {statistics.median(seconds[1:]):.1f} s")
        browser.close()


def open_page(page: Any, address: str, shown: Callable[[Any], Any]) -> None:
    page.goto(address)
    shown(page).first.wait_for(timeout=60_000)


def summary_run(root: Path, experiment_id: str) -> str:
    store = Store(default_uri(root), default_artifact_root(root))
    return next(run.run_id for run in store.runs(experiment_id) if "summary" in run.tags)


def wait_until_up(base_url: str) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the UI did not start within a minute")


def timed(work: Callable[[], Any]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def describe(what: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    median, p95 = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
    return f"{what}: median {median:.3f} s, p95 {p95:.3f} s, largest {ordered[-1]:.3f} s (n = {len(ordered)})"


if __name__ == "__main__":
    main()
