"""A study as a job on a Ray head with its token: sent, read, stopped, sent again. Without the token: refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import small_study, wait_until
from ray_head import Head, environment, ray_head

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as started:
        yield started


def tuner(head: Head, *arguments: str, token: str = "token") -> subprocess.CompletedProcess[str]:
    """Run a command that talks to the head, as an operator elsewhere does."""
    command = [sys.executable, "-m", "tuner", *arguments, "--address", f"http://127.0.0.1:{head.dashboard}"]
    env = {**environment("tuner", head.root / token), "MLFLOW_TRACKING_URI": ""}
    return subprocess.run(command, env=env, cwd=head.root, capture_output=True, text=True, check=False, timeout=200)


def ledger(head: Head) -> list[dict[str, Any]]:
    """Lines of trials in the study's ledger, which lies on the head."""
    path = head.root / "home" / "mlruns" / "studies" / "small" / "ledger.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line["record"] for line in map(json.loads, lines) if line["kind"] == "trial"]


def test_study_is_sent_read_stopped_and_goes_on_where_it_was(head: Head, tmp_path: Path, model: Path) -> None:
    study = small_study(tmp_path, model, tracking={"uri": f"sqlite:///{head.root / 'home' / 'mlflow.db'}"})

    sent = tuner(head, "submit", str(study), "--detach", "--trials", "1")
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()
    wait_until("a trial that runs", lambda: any(r["state"] == "running" for r in ledger(head)), 120)

    again = tuner(head, "submit", str(study), "--detach")
    assert again.stdout.strip() == job
    listed = json.loads(tuner(head, "jobs", "--json").stdout)
    assert [(j["id"], j["study"], j["status"]) for j in listed] == [(job, "small", "RUNNING")]
    assert "trial 0" in tuner(head, "logs", "small").stdout

    stopped = tuner(head, "stop", "small")
    assert stopped.stdout.strip() == f"{job}: STOPPED", stopped.stderr
    last = ledger(head)[-1]
    assert (last["number"], last["failure"]["kind"]) == (0, "interrupted")

    done = tuner(head, "submit", str(study), "--trials", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 trials are done" in done.stdout
    finished = [r for r in ledger(head) if r["state"] not in ("running", "failed")]
    assert [(r["number"], r["state"]) for r in finished] == [(0, "complete")]


def test_without_the_token_the_cluster_refuses_in_a_sentence(head: Head) -> None:
    refused = tuner(head, "jobs", token="another")

    assert refused.returncode == 1
    assert "refuses: Ray's token is missing or wrong" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
