"""A morning in the browser: from the UI's server to the front, its figure, and the reason why a trial failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from study_samples import sample_history, write_study

from tuner.tracking import Tracker, UiServer, experiment_url, ui_command
from tuner.tracking.summary import run_link
from tuner.tracking.views import FRONT, view_link
from tuner.view import Objective, StudyView, view

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 60.0
PATIENCE_MS = 30_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))


@dataclass(frozen=True)
class Served:
    """A study in a store, and the UI on it."""

    server: UiServer
    study: StudyView
    experiment_id: str
    runs: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("ui")
    uri, artifacts, folder = f"sqlite:///{root / 'mlflow.db'}", root / "artifacts", root / "studies" / "longdoc"
    history = sample_history(running=False)
    write_study(folder, history)
    result = Tracker(OBJECTIVES, uri=uri, artifact_root=artifacts).sync(history, folder, live=False, final=True)
    assert result.experiment_id is not None
    from mlflow.tracking import MlflowClient

    found = MlflowClient(tracking_uri=uri).search_runs([result.experiment_id], max_results=1000)
    runs = {run.data.tags.get("trial", "summary"): run.info.run_id for run in found}
    server = ui_command(uri, artifacts)
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen(
            server.command, env={**os.environ, **server.env}, stdout=log, stderr=subprocess.STDOUT, cwd=root
        )
        try:
            wait_until_up(server.base_url, root / "server.log")
            yield Served(server, view(history, OBJECTIVES), result.experiment_id, runs)
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_until_up(base_url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the UI did not start within {START_S:.0f} s:\n{log.read_text()[-2000:]}")


@pytest.fixture
def page(served: Served) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
    with playwright.sync_playwright() as running:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = running.chromium.launch(executable_path=CHROMIUM, args=arguments)
        opened = browser.new_page(viewport={"width": 1600, "height": 950})
        opened.set_default_timeout(PATIENCE_MS)
        opened.outside = []
        opened.on("request", lambda request: note_outside(opened, served.server.base_url, request.url))
        yield opened
        browser.close()


def note_outside(page: Any, base_url: str, url: str) -> None:
    if not url.startswith((base_url, "data:", "blob:", "about:")):
        page.outside.append(url)


def open_in_ui(page: Any, served: Served, link: str) -> None:
    page.goto(f"{served.server.base_url}/{link}")


def test_from_the_list_of_experiments_to_the_front(served: Served, page: Any, tmp_path: Path) -> None:
    page.goto(experiment_url(served.server.base_url))
    page.get_by_role("link", name="longdoc").wait_for()
    page.screenshot(path=tmp_path / "experiments.png")

    page.goto(experiment_url(served.server.base_url, served.experiment_id))
    page.get_by_text(f"{len(served.study.trials) + 1} matching runs").wait_for()
    page.get_by_text("Better than the defaults").first.wait_for()
    page.screenshot(path=tmp_path / "trials.png")

    search = page.locator("input[placeholder*='metrics.rmse']")
    search.fill("tags.pareto = 'true'")
    search.press("Enter")
    page.get_by_text(f"{len(served.study.front)} matching runs").wait_for()
    page.screenshot(path=tmp_path / "filtered.png")
    assert page.outside == []


def test_mlflows_own_charts_show_the_front(served: Served, page: Any, tmp_path: Path) -> None:
    open_in_ui(page, served, view_link(served.experiment_id, FRONT))
    page.get_by_text("Parallel Coordinates").first.wait_for()
    page.locator(".scatterlayer .point").first.wait_for()
    page.screenshot(path=tmp_path / "charts.png")
    assert page.locator(".scatterlayer .point").count() >= len(served.study.front)


def test_the_interactive_front_is_drawn_inside_the_ui(served: Served, page: Any, tmp_path: Path) -> None:
    open_in_ui(page, served, run_link(served.experiment_id, served.runs["summary"], "figures/front.html"))
    figure = page.frame_locator("iframe.mlflow-html-iframe")
    figure.locator(".scatterlayer .point").first.wait_for()
    assert figure.locator(".scatterlayer .point").count() >= len(served.study.results)

    # The last two points that are drawn are the knee and the defaults.
    knee = figure.locator(".scatterlayer .trace").nth(-2).locator(".point").bounding_box()
    page.mouse.move(knee["x"] + knee["width"] / 2, knee["y"] + knee["height"] / 2, steps=5)
    shown = figure.locator(".hoverlayer .hovertext")
    shown.first.wait_for()
    text = shown.first.text_content()
    assert f"trial {served.study.knee}" in text
    assert "max_num_seqs=" in text
    page.screenshot(path=tmp_path / "front.png")

    page.mouse.click(knee["x"] + knee["width"] / 2, knee["y"] + knee["height"] / 2)
    figure.get_by_text(f"run {served.runs[str(served.study.knee)]}").wait_for()
    assert page.outside == []


def test_a_failed_trial_says_why(served: Served, page: Any, tmp_path: Path) -> None:
    open_in_ui(page, served, run_link(served.experiment_id, served.runs["6"]))
    page.get_by_text("4.00 GiB KV cache is needed").first.wait_for()
    page.get_by_text("oom_kv_cache").first.wait_for()
    page.screenshot(path=tmp_path / "failed.png")

    open_in_ui(page, served, run_link(served.experiment_id, served.runs["6"], "engine.log"))
    page.get_by_text("Engine core initialization failed").first.wait_for()
    page.screenshot(path=tmp_path / "log.png")


def test_the_report_opens_without_a_network(served: Served, page: Any, tmp_path: Path) -> None:
    open_in_ui(page, served, run_link(served.experiment_id, served.runs["summary"], "report.html"))
    report = page.frame_locator("iframe.mlflow-html-iframe")
    report.locator("h1").wait_for()
    report.locator(".scatterlayer .point").first.wait_for()
    page.screenshot(path=tmp_path / "report.png")
    assert page.outside == []
