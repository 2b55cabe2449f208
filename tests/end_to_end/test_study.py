"""A study on the real engine: whole, and with its driver, its actor and its engine killed in the middle."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import Tuner, engine_processes, small_study, wait_until

pytestmark = pytest.mark.end_to_end


def running_trial(tuner: Tuner) -> int | None:
    records = tuner.ledger("small")
    return records[-1]["number"] if records and records[-1]["state"] == "running" else None


def is_measuring(tuner: Tuner, number: int) -> bool:
    return running_trial(tuner) == number and "tuner: stage run" in tuner.engine_log("small", number)


def mlflow_runs(folder: Path) -> list[tuple[str, str]]:
    """(trial, status) of every run of a trial, read from the store itself."""
    with sqlite3.connect(folder / "mlruns" / "mlflow.db") as store:
        return store.execute(
            "SELECT t.value, r.status FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'trial' "
            "WHERE r.lifecycle_stage = 'active'"
        ).fetchall()


def optuna_states(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "mlruns" / "studies" / "small" / "optuna.db") as store:
        return [state for (state,) in store.execute("SELECT state FROM trials ORDER BY number")]


def shared_memory() -> set[Path]:
    return {p for p in Path("/dev/shm").glob("psm_*") if p.stat().st_uid == os.getuid()}


def engines(tuner: Tuner) -> list[psutil.Process]:
    return [p for p in engine_processes(tuner.folder) if p.name().startswith(("ray::EngineHost", "VLLM"))]


def actor_of(tuner: Tuner) -> psutil.Process:
    return next(p for p in engine_processes(tuner.folder) if p.name().startswith("ray::EngineHost"))


def core_of(tuner: Tuner) -> psutil.Process:
    return next(p for p in engine_processes(tuner.folder) if "EngineCor" in p.name())


def test_study_survives_kills_of_driver_actor_and_engine_and_loses_nothing(tuner: Tuner, model: Path) -> None:
    study = small_study(tuner.folder, model)
    segments = shared_memory()

    driver = tuner.start("run", str(study))
    wait_until("trial 0 is measured", lambda: is_measuring(tuner, 0))
    busy = tuner.run("run", str(study))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert busy.returncode == 1
    assert "another `tuner run`" in busy.stderr

    wait_until("the engine ends with its driver", lambda: not engines(tuner), 20)
    tuner.forget_engine_log("small", 0)
    driver = tuner.start("run", str(study))
    wait_until("trial 0 is measured again", lambda: is_measuring(tuner, 0), 240)
    actor_of(tuner).kill()
    wait_until("trial 1 is measured", lambda: is_measuring(tuner, 1) or len(tuner.finished("small")) > 1, 300)
    if running_trial(tuner) == 1:
        core_of(tuner).kill()
    wait_until("trial 1 is over", lambda: any(r["number"] == 1 for r in tuner.finished("small")), 300)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=40) == 130, (tuner.folder / "output.txt").read_text()
    wait_until("nothing is left running", lambda: not engine_processes(tuner.folder), 15)

    done = tuner.run("run", str(study))
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr

    numbers = [r["number"] for r in tuner.finished("small")]
    assert len(numbers) == len(set(numbers)), "a trial was finished twice"
    front = tuner.front("small")
    assert [t["state"] for t in front["trials"] if t["state"] == "running"] == []
    assert sum(t["state"] in ("complete", "infeasible") for t in front["trials"]) >= 3
    assert "RUNNING" not in optuna_states(tuner.folder)
    runs = mlflow_runs(tuner.folder)
    assert sorted(int(number) for number, _ in runs) == sorted(t["number"] for t in front["trials"])
    assert {status for _, status in runs} <= {"FINISHED", "FAILED", "KILLED"}
    wait_until("nothing is left running", lambda: not engine_processes(tuner.folder), 15)
    assert shared_memory() <= segments


def test_memory_failure_on_the_engine_is_infeasible_and_the_like_is_refused_without_one(
    tuner: Tuner, model: Path
) -> None:
    study = small_study(
        tuner.folder,
        model,
        space={"kv_cache_memory_bytes": [16777216, 20971520, 134217728], "max_num_seqs": [4]},
        budget={"trials": 3},
        search={"startup_trials": 3, "seed": 0},
    )

    done = tuner.run("run", str(study), limit_s=500)

    assert "Traceback" not in done.stderr, done.stderr
    trials = tuner.front("small")["trials"]
    shown = [t for t in trials if t["failure"] and t["failure"]["stage"] == "kv_cache"]
    refused = [t for t in trials if t["failure"] and t["failure"]["stage"] == "gate"]
    assert shown, trials
    assert all(t["state"] == "infeasible" and t["violations"]["memory"] > 0 for t in (*shown, *refused))
    assert all(t["violations"]["memory"] < 0 for t in trials if t["state"] == "complete")


def test_export_of_a_measured_trial_is_what_was_measured(tuner: Tuner, model: Path) -> None:
    study = small_study(tuner.folder, model, space={"max_num_seqs": [2, 3]}, budget={"trials": 2})
    assert tuner.run("run", str(study), limit_s=400).returncode == 0

    exported = tuner.run("export", "small", "--format", "vllm", "--pick", "trial:1", "-o", "out")

    assert exported.returncode == 0, exported.stderr
    written = next((tuner.folder / "out").glob("*.yaml")).read_text()
    trial = next(t for t in tuner.front("small")["trials"] if t["number"] == 1)
    arguments = yaml.safe_load(written)
    assert arguments["max-num-seqs"] == trial["params"]["max_num_seqs"]
    assert "trial 1" in written
    again = tuner.run("export", "small", "--format", "vllm", "--pick", "trial:1", "-o", "out")
    assert again.returncode != 0
    assert "--force" in again.stderr
