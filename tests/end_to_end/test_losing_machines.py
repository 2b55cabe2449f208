"""A study on a cluster of Ray's own utilities that loses a machine and gains one: nothing lost, nothing doubled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, user_environment

pytestmark = pytest.mark.end_to_end


def test_study_loses_nothing_with_a_machine(tmp_path: Path) -> None:
    arguments = ["--trials", "24", "--nodes", "2", "--engines-per-node", "2", "--trial-s", "2", "--kill", "1"]
    arguments += ["--join", "1", "--sampler", "random", "--folder", str(tmp_path)]

    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), *arguments],
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "nothing lost, nothing doubled" in done.stdout
    assert "kill after" in done.stdout
