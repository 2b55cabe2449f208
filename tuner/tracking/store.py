"""MLflow's client, quietly and offline: the only importer of `mlflow`. Every fault comes out as `StoreError`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import StoreError
from tuner.secrets import mask
from tuner.tracking.content import Point

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

METRICS_A_BATCH, VALUES_A_BATCH = 900, 90
"""MLflow's interface takes 1,000 metrics or 100 params and tags in one request."""
RUNS_A_PAGE = 500
LONGEST_CAUSE = 200
"""Characters of MLflow's own words in an error of ours; it likes to append whole statements."""

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # A server that does not answer is tried again by the tracker, later; the client's own patience is 15 minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def default_uri(root: Path) -> str:
    """Where runs go unless the study says otherwise: MLFLOW_TRACKING_URI, or SQLite under `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root / 'mlruns' / 'mlflow.db').resolve()}"


def default_artifact_root(root: Path) -> Path:
    """Where files of runs go when the tracking URI is a database."""
    return (root / "mlruns" / "artifacts").resolve()


def is_server(uri: str) -> bool:
    """Whether a tracking URI is a server's, which keeps files of runs itself and has a UI of its own."""
    return uri.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as the store has it."""

    run_id: str
    status: str
    tags: Mapping[str, str]


class Store:
    """One tracking store.

    Parameters
    ----------
    uri:
        A database (`sqlite:////path/mlflow.db`, `postgresql://…`) or a server (`http://host:port`).
    artifact_root:
        Folder for the files of runs when `uri` is a database; a server says itself where they go.
    """

    def __init__(self, uri: str, artifact_root: Path) -> None:
        self.uri = uri
        self.artifact_root = artifact_root
        self._opened: MlflowClient | None = None

    @property
    def _client(self) -> MlflowClient:
        if self._opened is None:
            self._opened = _open(self.uri)
        return self._opened

    def experiment(self, name: str) -> tuple[str, Mapping[str, str]] | None:
        """Id and tags of the experiment of this name, taken out of the waste bin if someone threw it there."""
        with self._told_as_store_error():
            found = self._client.get_experiment_by_name(name)
            if found is None:
                return None
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
            return str(found.experiment_id), dict(found.tags)

    def tagged_experiment(self, key: str, value: str) -> str | None:
        """Id of the experiment that has this tag, if there is one outside the waste bin."""
        with self._told_as_store_error():
            found = self._client.search_experiments(filter_string=f"tags.`{key}` = '{value}'", max_results=1)
            return str(found[0].experiment_id) if found else None

    def create_experiment(self, name: str, tags: Mapping[str, str]) -> str:
        """Make an experiment and return its id."""
        folder = self.artifact_root / re.sub(r"[^\w.-]+", "_", name)
        location = None if is_server(self.uri) else folder.as_uri()
        with self._told_as_store_error():
            return str(self._client.create_experiment(name, artifact_location=location, tags=dict(tags)))

    def rename_experiment(self, experiment_id: str, name: str) -> None:
        """Give an experiment another name."""
        with self._told_as_store_error():
            self._client.rename_experiment(experiment_id, name)

    def tag_experiment(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of an experiment."""
        with self._told_as_store_error():
            for key, value in tags.items():
                self._client.set_experiment_tag(experiment_id, key, value)

    def runs(self, experiment_id: str) -> list[StoredRun]:
        """Every run of the experiment that is not deleted, oldest first."""
        found: list[StoredRun] = []
        token: str | None = None
        with self._told_as_store_error():
            while True:
                page = self._client.search_runs(
                    [experiment_id], max_results=RUNS_A_PAGE, order_by=["attributes.start_time ASC"], page_token=token
                )
                found += [StoredRun(run.info.run_id, run.info.status, dict(run.data.tags)) for run in page]
                token = page.token
                if not token:
                    return found

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], started_ms: int) -> str:
        """Start a run and return its id."""
        with self._told_as_store_error():
            run = self._client.create_run(experiment_id, start_time=started_ms, tags=dict(tags), run_name=name)
            return str(run.info.run_id)

    def log(self, run_id: str, points: Iterable[Point] = (), params: Mapping[str, str] | None = None) -> None:
        """Add metrics and params. The same point twice is one point."""
        from mlflow.entities import Metric, Param

        metrics = [Metric(p.key, p.value, p.at_ms, p.step) for p in points]
        values = [Param(key, value) for key, value in (params or {}).items()]
        with self._told_as_store_error():
            # Together as far as they fit: each batch is a transaction that the disk has to confirm.
            for batch in zip_longest(
                _batches(metrics, METRICS_A_BATCH), _batches(values, VALUES_A_BATCH), fillvalue=()
            ):
                self._client.log_batch(run_id, metrics=batch[0], params=batch[1])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run."""
        from mlflow.entities import RunTag

        with self._told_as_store_error():
            self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def add_files(self, run_id: str, folder: Path, into: str | None = None) -> None:
        """Store every file in `folder`, over those of the same names; `into` a folder of the run's files."""
        with self._told_as_store_error():
            self._client.log_artifacts(run_id, str(folder), into)

    def set_status(self, run_id: str, status: str, ended_ms: int | None) -> None:
        """Close a run, or open it again with `"RUNNING"`."""
        with self._told_as_store_error():
            if status == "RUNNING":
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status=status, end_time=ended_ms)

    def delete_run(self, run_id: str) -> None:
        """Put a run into the waste bin."""
        with self._told_as_store_error():
            self._client.delete_run(run_id)

    def last_step(self, run_id: str, key: str) -> int:
        """Largest step of a stepped metric, -1 where it has none."""
        with self._told_as_store_error():
            return max((int(m.step) for m in self._client.get_metric_history(run_id, key)), default=-1)

    def ensure_model(self, name: str, description: str) -> None:
        """Make the registered model of this name, unless it is there."""
        with self._told_as_store_error():
            if not self._client.search_registered_models(f"name = '{name}'", max_results=1):
                self._client.create_registered_model(name, description=description)

    def version_of(self, name: str, run_id: str) -> str | None:
        """Version of a registered model that was made from this run, the latest of several."""
        with self._told_as_store_error():
            found = self._client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
            return max((str(v.version) for v in found), key=int, default=None)

    def create_version(self, name: str, run_id: str, folder: str) -> str:
        """Make a version of a registered model that points at a folder of the run's files, and return its number."""
        with self._told_as_store_error():
            source = f"{self._client.get_run(run_id).info.artifact_uri}/{folder}"
            return str(self._client.create_model_version(name, source, run_id, await_creation_for=0).version)

    def describe_version(self, name: str, version: str, description: str, tags: Mapping[str, str]) -> None:
        """Set description and tags of a version."""
        with self._told_as_store_error():
            self._client.update_model_version(name, version, description)
            for key, value in tags.items():
                self._client.set_model_version_tag(name, version, key, value)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, wherever it pointed before."""
        with self._told_as_store_error():
            self._client.set_registered_model_alias(name, alias, version)

    @contextmanager
    def _told_as_store_error(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, OSError) as error:
            self._opened = None
            cause = mask(" ".join(str(error).partition("[SQL:")[0].split()))[:LONGEST_CAUSE]
            raise StoreError(
                f"{mask(self.uri)}: MLflow cannot be written ({cause}); nothing is lost: the ledger has it all, and "
                "`tuner track STUDY` brings MLflow up to date"
            ) from error


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _open(uri: str) -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # Its log repeats with whole tracebacks what `StoreError` says in a sentence.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)
