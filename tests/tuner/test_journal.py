from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from study_samples import sample_history

from tuner.journal import KEPT, Journal
from tuner.proposal import Proposal

HISTORY = sample_history(12)
SECRET = "correct-horse-battery"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_trial_is_told_with_its_stages_and_how_long_each_took(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    record = HISTORY.trials[1]

    journal.began(Proposal(1, "design", {"max_num_seqs": 4}, True), 10, 1_800_000_000.0)
    for text in ("start engine", "warm up", "run 1/3", "run 2/3", "run 3/3", "stop engine"):
        journal.progressed(1, text)
    journal.finished(record, HISTORY)

    seen = lines(tmp_path)
    assert [entry["event"] for entry in seen] == ["trial_begun", *["stage"] * 4, "trial_finished"]
    assert [entry["stage"] for entry in seen if entry["event"] == "stage"] == [
        "start engine",
        "warm up",
        "run",
        "stop engine",
    ]
    assert all(entry["duration_s"] >= 0 for entry in seen[1:])
    assert {entry["trial"] for entry in seen} == {1}
    assert seen[0]["ends_at"].startswith("2027-01-15T08:00:00")
    assert seen[-1]["state"] == record.state.value


def test_trials_side_by_side_have_stages_of_their_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    for number in (1, 2):
        journal.began(Proposal(number, "design", {}, True), None, None)
        journal.progressed(number, "start engine")
    journal.progressed(2, "warm up")
    journal.progressed(1, "warm up")

    assert [entry["trial"] for entry in lines(tmp_path) if entry["event"] == "stage"] == [2, 1]


def test_failure_is_told_with_kind_stage_and_evidence(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    failed = next(t for t in HISTORY.trials if t.failure is not None)

    journal.finished(failed, HISTORY)

    (entry,) = lines(tmp_path)
    assert failed.failure is not None
    assert entry["failure"] == {"kind": failed.failure.kind.value, "stage": failed.failure.stage.value}
    assert entry["message"] == failed.failure.message


def test_secrets_of_the_study_never_reach_the_log(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"HF_TOKEN": SECRET})

    journal.began(Proposal(1, "operator", {"env.HF_TOKEN": SECRET, "max_num_seqs": 4}, True), None, None)
    journal.noted(f"the hub refused {SECRET}")

    text = (tmp_path / "log.jsonl").read_text()
    assert SECRET not in text
    assert '"max_num_seqs": 4' in text


def test_log_is_rotated_and_the_oldest_lines_go(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {}, most_bytes=1000)

    for index in range(200):
        journal.noted(f"line {index}")

    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == sorted(["log.jsonl", *(f"log.{i}.jsonl" for i in range(1, KEPT + 1))])
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert lines(tmp_path)[-1]["text"] == "line 199"


def test_only_the_owner_may_read_the_log(tmp_path: Path) -> None:
    Journal(tmp_path, {}).noted("begun")

    assert (tmp_path / "log.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["gone", "log.jsonl/not-a-folder"])
def test_log_that_cannot_be_written_costs_nothing_but_its_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / "log.jsonl").write_text("")

    Journal(tmp_path / name, {}).noted("nobody hears this")

    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_log_whose_place_is_taken_costs_nothing_but_its_lines(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()

    Journal(tmp_path, {}).noted("nobody hears this")
