"""A study whose Optuna part lies in PostgreSQL: it goes on there, and `--fresh` begins another one beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Tuner
from postgres_server import Postgres, binaries

pytestmark = pytest.mark.end_to_end

PASSWORD = "0123456789abcdef"


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    found = binaries()
    if found is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    server = Postgres(found, PASSWORD)
    try:
        server.start()
        server.create_database("optuna")
        yield server
    finally:
        server.remove()


def twin_study(folder: Path, address: str) -> Path:
    """A study of the twin: trials of a second, no engine."""
    example = ROOT / "examples" / "a6000-qwen32b-longdoc.yaml"
    document = yaml.safe_load(example.read_text())
    document |= {
        "study": "night",
        "model_config_file": str(example.parent / document["model_config_file"]),
        "engine": {"backend": "twin", "device": "a6000", "args": {"tensor_parallel_size": 4, "max_model_len": 8448}},
        "workload": {
            "kind": "long_documents",
            "prompt_tokens": {512: 8, 2048: 4},
            "output_tokens": 16,
            "arrivals": {"kind": "poisson", "rate_per_s": 1},
        },
        "space": {"max_num_seqs": [12, 16, 32, 64], "max_num_batched_tokens": [512, 2048, 8192]},
        "recipes": [],
        "noise": {"aa_runs": 0, "sentinel_every": 0},
        "budget": {"trials": 2},
        "storage": address,
    }
    path = folder / "night.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def studies(postgres: Postgres) -> dict[str, int]:
    """Studies in the database, and how many trials each has."""
    import psycopg

    query = "SELECT s.study_name, count(t.trial_id) FROM studies s JOIN trials t USING (study_id) GROUP BY s.study_name"
    with psycopg.connect(f"postgresql://tuner:{PASSWORD}@{postgres.address}/optuna") as connection:
        return {str(name): int(count) for name, count in connection.execute(query).fetchall()}


def test_study_in_postgresql_goes_on_and_starts_over_there(
    tuner: Tuner, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    study = twin_study(tuner.folder, f"postgresql://tuner@{postgres.address}/optuna")

    for arguments in ([], ["--trials", "3"]):
        done = tuner.run("run", str(study), *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
    (first,) = studies(postgres)
    begun = studies(postgres)
    assert begun[first] == len({r["number"] for r in tuner.ledger("night")}) >= 3
    assert not (tuner.folder / "mlruns" / "studies" / "night" / "optuna.db").exists()

    done = tuner.run("run", str(study), "--fresh")
    assert done.returncode == 0, done.stderr[-3000:]
    (again,) = studies(postgres).keys() - begun.keys()
    assert studies(postgres) == {**begun, again: len({r["number"] for r in tuner.ledger("night")})}
    assert PASSWORD not in (tuner.folder / "mlruns" / "studies" / "night" / "storage.json").read_text()
