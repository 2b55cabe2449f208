from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from toy_study import DEFAULTS, ToyEngine, ToyStudy, args_of, measured, oom_beyond

from tuner import doctor
from tuner.doctor import Examination, examine
from tuner.engine.processes import ProcessIdentity
from tuner.ledger import StudyNote, TrialState
from tuner.night import is_open
from tuner.study_folder import StudyFolder
from tuner.view import view

MODEL = {"model": "org/model"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of studies in which one of four trials has run to its end."""
    studies = tmp_path_factory.mktemp("finished")
    ToyStudy.at(studies).run(ToyEngine(), trials=4)
    return studies


@pytest.fixture
def study(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyStudy:
    """A copy of it, where the commands look for it."""
    monkeypatch.chdir(tmp_path)
    # MLflow takes seconds to lay out its tables; its part has tests of its own in test_tracking.
    monkeypatch.setattr(doctor, "CHECKS", {n: c for n, c in doctor.CHECKS.items() if n != "mlflow"})
    studies = tmp_path / "mlruns" / "studies"
    shutil.copytree(finished, studies)
    return ToyStudy(StudyFolder(studies / "toy"))


def ledger_of(study: ToyStudy) -> Path:
    return study.folder.path / "ledger.jsonl"


def found(examination: Examination) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in examination.findings]


def test_study_that_ended_well_is_healthy(study: ToyStudy) -> None:
    before = ledger_of(study).read_bytes()

    examination = examine(study.file)

    assert examination.findings == ()
    assert examination.healthy
    assert ledger_of(study).read_bytes() == before
    assert examination.lines()[-1].startswith("toy: healthy (8 checks, 0 findings)")
    assert json.loads(json.dumps(examination.document()))["healthy"] is True


@pytest.mark.parametrize("torn", [b'{"kind":"trial","record":{"num', b'{"kind":"trial"}\n', b"\x00\x00\x00"])
def test_line_that_a_crash_cut_off_is_removed(study: ToyStudy, torn: bytes) -> None:
    whole = ledger_of(study).read_bytes()
    ledger_of(study).write_bytes(whole + torn)

    examination = examine(study.file)

    assert found(examination) == [("ledger", "mended")]
    assert ledger_of(study).read_bytes() == whole
    assert examine(study.file).findings == ()


def test_ledger_with_a_broken_line_in_the_middle_cannot_be_mended_and_nothing_else_is_touched(study: ToyStudy) -> None:
    lines = ledger_of(study).read_bytes().splitlines(keepends=True)
    broken = b"".join([*lines[:2], b"{}\n", *lines[2:]])
    ledger_of(study).write_bytes(broken)

    examination = examine(study.file)

    assert found(examination) == [("ledger", "broken")]
    assert "line 3 is not a record" in examination.findings[0].text
    assert not examination.healthy
    assert ledger_of(study).read_bytes() == broken


def test_trial_that_was_finished_twice_is_told(study: ToyStudy) -> None:
    lines = ledger_of(study).read_bytes().splitlines(keepends=True)
    trial = next(line for line in lines if b'"complete"' in line)
    ledger_of(study).write_bytes(b"".join([*lines, trial]))

    examination = examine(study.file)

    assert found(examination) == [("ledger", "broken")]
    assert "was finished 2 times" in examination.findings[0].text


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_trial_that_ran_when_its_driver_was_killed_is_closed_and_run_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", {n: c for n, c in doctor.CHECKS.items() if n != "mlflow"})
    study = ToyStudy.at(tmp_path / "mlruns" / "studies")
    with pytest.raises(Killed):
        study.run(ToyEngine(lambda config, call: Killed() if call == 2 else oom_beyond(config, call)), trials=4)
    assert study.trials[-1].state is TrialState.RUNNING

    examination = examine(study.file)

    assert found(examination) == [("open trials", "mended")]
    assert is_open(study.trials[-1])
    assert study.told()[2][0] == "RUNNING"
    study.run(ToyEngine(), trials=4)
    assert [t.number for t in study.trials if not is_open(t)] == list(range(len(study.trials)))
    assert examine(study.file).findings == ()


def test_trial_that_optuna_was_not_told_of_is_told(study: ToyStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object, **__: object) -> None:
        raise Killed

    run = study.open(ToyEngine(lambda config, _: measured(config)), trials=5)
    monkeypatch.setattr(run._rooms.proposer, "tell_measured", kill)
    with pytest.raises(Killed):
        run.run()
    number = study.trials[-1].number

    examination = examine(study.file)

    assert found(examination) == [("optuna", "mended")]
    assert study.told()[number][0] == "COMPLETE"


def test_trial_that_optuna_knows_and_the_ledger_lost_is_told(study: ToyStudy) -> None:
    measured_once = [
        t for t in study.trials if t.state is TrialState.COMPLETE and args_of(t.config) != DEFAULTS | MODEL
    ]
    number = measured_once[-1].number
    lines = ledger_of(study).read_bytes().splitlines(keepends=True)
    ledger_of(study).write_bytes(b"".join(line for line in lines if b'"number":%d,' % number not in line))

    (finding,) = examine(study.file).findings
    assert finding.text == f"trial {number} was told to Optuna and is lost from the ledger"


def test_known_proposal_that_was_told_without_a_line_is_no_loss(study: ToyStudy) -> None:
    known = next(t for t in study.trials if t.state is TrialState.COMPLETE and t.source == "design")
    study.proposer().enqueue("operator", dict(known.params), {})
    study.run(ToyEngine(), trials=5)

    assert examine(study.file).findings == ()


@pytest.mark.parametrize("gone", ["optuna.db", "another study's"])
def test_storage_of_optuna_that_is_gone_or_another_s_is_told(study: ToyStudy, gone: str) -> None:
    storage = study.folder.path / "optuna.db"
    if gone == "optuna.db":
        storage.unlink()
    else:
        with sqlite3.connect(storage) as store:
            store.execute("DELETE FROM trials WHERE number > 1")
        store.close()

    examination = examine(study.file)

    assert {check for check, _ in found(examination)} == {"optuna"}
    assert ("cannot go on without" in examination.findings[0].text) == (gone == "optuna.db")
    assert not examination.healthy
    assert storage.exists() == (gone != "optuna.db")


@pytest.mark.parametrize("name", ["facts.json", "requests.parquet", "steps.parquet", "device.parquet"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut off"])
def test_measured_trial_without_its_tables_is_told(study: ToyStudy, name: str, how: str) -> None:
    number = view(study.history, study.file_objectives).front[0]
    path = study.folder.trial(number) / name
    path.unlink() if how == "gone" else os.truncate(path, 0 if how == "empty" else path.stat().st_size // 2)

    examination = examine(study.file)

    assert found(examination) == [("tables", "broken")]
    assert f"trial {number} has no readable tables" in examination.findings[0].text


def test_reference_without_its_tables_is_told_with_what_to_do(study: ToyStudy) -> None:
    (study.folder.trial(0) / "facts.json").unlink()

    assert "start over with `tuner run --fresh`" in examine(study.file).findings[0].text


def test_processes_that_a_killed_run_left_are_ended(study: ToyStudy) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    study.folder.note_processes([ProcessIdentity.of(left.pid)])

    examination = examine(study.file)

    assert found(examination) == [("processes", "mended")]
    assert left.wait(5) != 0


def test_folder_that_others_can_read_is_closed_to_them(study: ToyStudy) -> None:
    study.folder.path.chmod(0o755)

    assert found(examine(study.file)) == [("rights", "mended")]
    assert study.folder.path.stat().st_mode & 0o777 == 0o700


def test_study_that_runs_is_only_looked_at(study: ToyStudy) -> None:
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(60)"
    )
    lock = study.folder.path / "lock"
    torn = ledger_of(study).read_bytes() + b'{"kind":"tri'
    ledger_of(study).write_bytes(torn)
    driver = subprocess.Popen([sys.executable, "-c", holder, str(lock)], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        driver.stdout.readline()
        examination = examine(study.file)
    finally:
        driver.kill()
        driver.communicate()

    assert (examination.running, examination.findings) == (True, ())
    assert "only looked at" in examination.lines()[-1]
    assert ledger_of(study).read_bytes() == torn


def test_member_of_the_front_from_a_stretch_of_drift_is_told_as_advice(study: ToyStudy) -> None:
    number = next(n for n in view(study.history, study.file_objectives).front if n > 0)
    values = {"since": number - 1, "until": number + 1}
    study.folder.ledger.append(StudyNote("drift", "it drifted", 0.0, values))

    examination = examine(study.file)

    assert found(examination) == [("front", "advice")]
    assert examination.healthy
