from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_study import Heard, ToyEngine, ToyStudy

from tuner.errors import StudyBusyError, StudyFileError, StudyStoppedError
from tuner.log_cap import MOST_BYTES
from tuner.night import Deadline
from tuner.study import Ending
from tuner.watching import served, watched


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyStudy:
    """A finished study, where the commands look for it, whose summary goes into told.json."""
    monkeypatch.chdir(tmp_path)
    program = "import sys; open('told.json', 'a').write(sys.stdin.read() + chr(10))"
    toy = ToyStudy.in_memory(tmp_path / "mlruns" / "studies", notify={"command": [sys.executable, "-c", program]})
    toy.run(ToyEngine(), trials=3)
    return toy


def told(folder: Path) -> list[dict[str, Any]]:
    path = folder / "told.json"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def journal(study: ToyStudy) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (study.folder.path / "log.jsonl").read_text().splitlines()]


def test_end_of_a_run_is_written_down_and_told(study: ToyStudy, tmp_path: Path) -> None:
    with watched(study.file, Heard()) as watch, served(watch, 3, Deadline(at=2e9)):
        watch.ending = Ending("budget", "3 of 3 trials are done")

    (summary,) = told(tmp_path)
    assert (summary["study"], summary["ending"], summary["text"]) == ("toy", "budget", "3 of 3 trials are done")
    assert sum(summary["trials"].values()) == 3
    assert summary["front"]
    assert [entry["event"] for entry in journal(study)] == ["run_begun", "run_ended"]


@pytest.mark.parametrize(
    ("error", "ending"),
    [(StudyStoppedError("the machine failed"), "machine"), (KeyboardInterrupt(), "stopped")],
)
def test_run_that_is_ended_otherwise_is_told_too(
    study: ToyStudy, tmp_path: Path, error: BaseException, ending: str
) -> None:
    with pytest.raises(type(error)), watched(study.file, Heard()):
        raise error

    assert [summary["ending"] for summary in told(tmp_path)] == [ending]


@pytest.mark.parametrize("error", [StudyBusyError("another one"), StudyFileError("study.yaml", [("", "is wrong")])])
def test_call_that_began_nothing_tells_nobody(study: ToyStudy, tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), watched(study.file, Heard()):
        raise error

    assert told(tmp_path) == []
    assert not (study.folder.path / "log.jsonl").exists()


def test_what_the_loop_says_reaches_the_display_and_the_log(study: ToyStudy) -> None:
    heard = Heard()
    with watched(study.file, heard) as watch:
        study.heard = watch  # type: ignore[assignment]  # a listener as well
        study.run(ToyEngine(), trials=4)

    events = [entry["event"] for entry in journal(study)]
    assert events.count("trial_begun") == len(heard.begun) == 1
    assert events.count("trial_finished") == len(heard.records)
    assert heard.stages == ["run 1/1"]
    assert heard.notes == ["4 of 4 trials are done"]


def test_log_of_a_trial_that_is_over_is_cut_to_size(study: ToyStudy) -> None:
    record = study.trials[0]
    log = study.folder.trial(record.number) / "engine.log"
    log.write_bytes(b"x" * (2 * MOST_BYTES))

    with watched(study.file, Heard()) as watch:
        watch.finished(record, study.history)

    assert log.stat().st_size < MOST_BYTES + 100


def test_port_that_is_taken_is_noted_and_the_study_goes_on(study: ToyStudy) -> None:
    heard = Heard()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        study.changes = {**study.changes, "prometheus": {"port": taken.getsockname()[1]}}
        with watched(study.file, heard) as watch, served(watch, 3, None):
            pass

    assert len(heard.notes) == 1
    assert "cannot be had" in heard.notes[0]


def test_limits_of_the_run_lie_beside_the_ledger_while_it_runs(study: ToyStudy) -> None:
    with watched(study.file, Heard()) as watch, served(watch, None, Deadline(at=2e9)):
        limits = json.loads((study.folder.path / "run.json").read_text())

    assert limits["trials"] == 8
    assert limits["ends_by"] == pytest.approx(2e9, abs=5)
