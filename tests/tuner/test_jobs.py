from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_study import SPEC

from tuner.errors import StudyFileError
from tuner.jobs import Job, bundle_files, entrypoint
from tuner.study_file import StudyFile, parse


def study(folder: Path, **changes: Any) -> StudyFile:
    """A study file on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "night.yaml"
    document = {**SPEC, **changes}
    path.write_text(yaml.safe_dump(document))
    return StudyFile(path, parse(document, path))


def requests_of(path: str) -> dict[str, Any]:
    return {"kind": "jsonl", "path": path, "arrivals": {"kind": "constant", "rate_per_s": 1}}


def sent(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    made = tmp_path / "bundle"
    made.mkdir()
    return made


def test_study_travels_with_the_files_that_it_names_and_nothing_else(tmp_path: Path, bundle: Path) -> None:
    folder = tmp_path / "studies"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "requests.jsonl").write_text("{}")
    (folder / "own.py").write_text("def cost(m): return 1.0")
    (folder / "another.yaml").write_text("study: another")
    file = study(
        folder,
        workload=requests_of("data/requests.jsonl"),
        objectives=["ttft_p95_s", {"metric": "own:cost", "direction": "minimize"}],
    )

    name = bundle_files(file, bundle)

    assert name == "night.yaml"
    assert sorted(sent(bundle)) == ["data/requests.jsonl", "night.yaml", "own.py"]
    assert yaml.safe_load((bundle / name).read_text()) == yaml.safe_load(file.path.read_text())


def test_folder_of_a_model_is_named_in_full(tmp_path: Path, bundle: Path) -> None:
    file = study(tmp_path / "studies", model="../models/small")

    bundle_files(file, bundle)

    assert yaml.safe_load((bundle / "night.yaml").read_text())["model"] == str(tmp_path / "models" / "small")


def test_file_outside_the_study_folder_is_refused(tmp_path: Path, bundle: Path) -> None:
    file = study(tmp_path / "studies", workload=requests_of("../requests.jsonl"))

    with pytest.raises(StudyFileError, match=r"workload\.path: \.\./requests\.jsonl lies outside"):
        bundle_files(file, bundle)


def test_job_runs_in_the_home_of_the_tuner_and_keeps_the_files_there(tmp_path: Path, bundle: Path) -> None:
    programs, home = tmp_path / "bin", tmp_path / "a home"
    programs.mkdir()
    home.mkdir()
    (programs / "python3").write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    (programs / "python3").chmod(0o755)
    (bundle / "night.yaml").write_text("study: toy")
    env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "TUNER_HOME": str(home), "HOME": "/nowhere"}

    done = subprocess.run(
        ["sh", "-c", entrypoint("toy", "night.yaml", ["--until", "07:00"])],
        env=env, cwd=bundle, capture_output=True, text=True, check=True,
    )  # fmt: skip

    kept = "mlruns/submitted/toy/night.yaml"
    assert done.stdout.splitlines() == [str(home), "-m", "tuner", "run", kept, "--until", "07:00"]
    assert (home / kept).read_text() == "study: toy"


def test_job_that_ended_is_over() -> None:
    assert [status for status in ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED")
            if Job("toy-1", "toy", status, None).is_over] == ["SUCCEEDED", "FAILED", "STOPPED"]  # fmt: skip
