"""What several modules of fast tests share because it takes seconds to make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes seconds to make its tables; every test gets a copy."""
    from tuner.tracking.store import Store

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    Store(f"sqlite:///{path}", path.parent).experiment("none")
    return path


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Freeze what other tests imported once a module: the load driver would do it at the start of every load."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
