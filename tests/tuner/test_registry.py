"""A choice as a version of a registered model, in a real SQLite store, asked for as a deployment asks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import export_samples
import pytest
import yaml
from study_samples import sample_history, sample_verification, write_study

from tuner.errors import StoreError
from tuner.export.deployment import Deployment, deployment
from tuner.ledger import History
from tuner.tracking import Tracker
from tuner.tracking.registry import ALIAS, Registered, model_name
from tuner.view import Objective, view

# MLflow calls what SQLAlchemy has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
HISTORY = sample_history(3, running=False)
NAME = "longdoc-Qwen3-32B"


class Registry:
    """A store with a study in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = f"sqlite:///{root / 'mlflow.db'}"
        self.folder = root / "studies" / "longdoc"
        self.tracker = Tracker(OBJECTIVES, uri=self.uri, artifact_root=root / "artifacts", summary_every_s=1e9)

    def sync(self, history: History = HISTORY) -> None:
        self.tracker.sync(history, self.folder, live=False)

    def register(self, number: int, history: History = HISTORY) -> Registered:
        return self.tracker.register(deployed(number, history))

    @property
    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def versions(self) -> list[Any]:
        return list(self.client.search_model_versions(f"name = '{NAME}'"))


def deployed(number: int, history: History = HISTORY) -> Deployment:
    study = view(history, OBJECTIVES)
    return deployment(study, study.trial(number), defaults={})


def download(uri: str, tracking_uri: str, into: Path) -> Path:
    """What the README shows, in a process of its own: the client keeps its address for the whole process."""
    command = [sys.executable, "-m", "mlflow", "artifacts", "download", "-u", uri, "-d", str(into)]
    env = {**os.environ, "MLFLOW_TRACKING_URI": tracking_uri, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return into


@pytest.fixture
def registry(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr("tuner.tracking.summary.write_figures", lambda *_: [])
    monkeypatch.setattr("tuner.tracking.summary.report_page", lambda *_: "")
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    place = Registry(tmp_path)
    write_study(place.folder, HISTORY, tables=False)
    place.sync()
    return place


def test_a_deployment_asks_mlflow_for_the_champion_and_gets_what_vllm_serve_reads(
    registry: Registry, tmp_path: Path
) -> None:
    done = registry.register(1)

    folder = download(done.uri, registry.uri, tmp_path / "deploy")

    assert done == Registered(NAME, "1", ALIAS, created=True)
    assert done.uri == f"models:/{NAME}@champion"
    arguments = yaml.safe_load((folder / "vllm.yaml").read_text())
    assert arguments["max-num-seqs"] == HISTORY.trials[1].params["max_num_seqs"]
    assert arguments["model"] == "Qwen/Qwen3-32B"
    assert json.loads((folder / "vllm.json").read_text())["trial"] == 1
    assert "vllm serve --config vllm.yaml" in (folder / "vllm.yaml").read_text()


def test_the_same_trial_again_has_no_second_version_and_takes_the_alias_back(registry: Registry) -> None:
    first, other, again = registry.register(1), registry.register(2), registry.register(1)

    assert (first.version, other.version, again.version) == ("1", "2", "1")
    assert (other.created, again.created) == (True, False)
    assert len(registry.versions()) == 2
    assert str(registry.client.get_model_version_by_alias(NAME, ALIAS).version) == "1"


def test_a_version_says_where_it_comes_from_and_what_was_measured(registry: Registry) -> None:
    registry.register(1)

    (version,) = registry.versions()
    assert (
        version.run_id
        == registry.client.search_runs(
            [registry.client.get_experiment_by_name("longdoc").experiment_id], "tags.trial = '1'"
        )[0].info.run_id
    )
    assert version.tags["study"] == "longdoc"
    assert version.tags["trial"] == "1"
    assert version.tags["workload.fingerprint"] == "ab12cd34ef56ab78"
    assert version.tags["verified"] == "false"
    assert float(version.tags["ttft_p95_s"]) > 0
    assert float(version.tags["ttft_p95_s.reference"]) > 0
    assert "Study longdoc, trial 1, measured on" in version.description


def test_a_version_that_is_registered_again_says_that_it_was_verified_since(registry: Registry) -> None:
    registry.register(1)
    later = dataclasses.replace(HISTORY, verifications=(sample_verification(1),))
    registry.sync(later)

    registry.register(1, later)

    (version,) = registry.versions()
    assert version.tags["verified"] == "true"
    assert "Verified over HTTP in 3 rounds" in version.description


def test_a_trial_without_a_run_is_one_sentence(registry: Registry) -> None:
    unknown = dataclasses.replace(deployed(1), trial=77)

    with pytest.raises(StoreError, match="trial 77 has no run in MLflow yet"):
        registry.tracker.register(unknown)


def test_the_models_name_is_one_that_mlflow_takes(registry: Registry) -> None:
    from mlflow.utils.validation import _validate_model_name

    for sample in (export_samples.plain(), export_samples.hostile()):
        name = model_name(sample)
        _validate_model_name(name)
        assert "@" not in name
        assert "'" not in name
