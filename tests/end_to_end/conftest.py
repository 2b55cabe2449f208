from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model() -> Path:
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the quickstart model is not there; `make models/smollm2-135m-instruct` prepares it")
    return MODEL


def user_environment() -> dict[str, str]:
    """The environment without what MLflow's own client leaves in it when other tests use it in this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


class Tuner:
    """The command in a folder of its own, as a user runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[psutil.Popen] = []

    def start(self, *arguments: str) -> psutil.Popen:
        environment = user_environment()
        with (self.folder / "output.txt").open("a") as output:
            process = psutil.Popen(
                [sys.executable, "-m", "tuner", *arguments],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    def run(self, *arguments: str, limit_s: float = 400) -> subprocess.CompletedProcess[str]:
        environment = user_environment()
        return subprocess.run(
            [sys.executable, "-m", "tuner", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def ledger(self, study: str) -> list[dict[str, Any]]:
        path = self.folder / "mlruns" / "studies" / study / "ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["record"] for line in lines if line.endswith("}") and '"kind":"trial"' in line[-20:]]

    def finished(self, study: str) -> list[dict[str, Any]]:
        return [r for r in self.ledger(study) if r["state"] != "running" and _kind(r) != "interrupted"]

    def front(self, study: str) -> dict[str, Any]:
        done = self.run("front", study, "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def engine_log(self, study: str, number: int) -> str:
        path = self.folder / "mlruns" / "studies" / study / "trials" / str(number) / "engine.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def forget_engine_log(self, study: str, number: int) -> None:
        (self.folder / "mlruns" / "studies" / study / "trials" / str(number) / "engine.log").unlink(missing_ok=True)


def _kind(record: dict[str, Any]) -> str | None:
    return record["failure"]["kind"] if record["failure"] else None


def wait_until(what: str, holds: Callable[[], bool], limit_s: float = 180) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {limit_s} s for: {what}"
        time.sleep(0.1)


def engine_processes(folder: Path) -> list[psutil.Process]:
    """Every process of a study in this folder that is not a driver: Ray's, the actor, the engine's."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PWD_OF_TEST") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    monkeypatch.setenv("PWD_OF_TEST", str(tmp_path))
    command = Tuner(tmp_path)
    yield command
    for process in (*command.started, *engine_processes(tmp_path)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            process.wait(10)


def small_study(folder: Path, model: Path, **changes: Any) -> Path:
    """A study of a few short trials on the real engine."""
    document: dict[str, Any] = {
        "study": "small",
        "model": str(model),
        "engine": {
            "args": {"max_model_len": 2048, "enforce_eager": True, "gpu_memory_utilization": 0.2},
            "env": {"HF_HUB_OFFLINE": 1},
        },
        "workload": {
            "kind": "long_documents",
            "prompt_tokens": {"128": 8, "512": 4},
            "output_tokens": 16,
            "arrivals": {"kind": "poisson", "rate_per_s": 4},
            "seed": 1,
        },
        "space": {"max_num_seqs": [1, 4, 16], "kv_cache_memory_bytes": [16777216, 134217728]},
        "objectives": ["ttft_p95_s", "tpot_p95_s"],
        "budget": {"trials": 3},
        "search": {"startup_trials": 2, "seed": 3},
        "noise": {"aa_runs": 0, "sentinel_every": 0},
        "measure": {"start_budget_s": 240, "run_budget_s": 240, "speed_change_limit": 3.0},
        **changes,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
