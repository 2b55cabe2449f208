"""Secrets that are planted in a study, and everything that is written or said about it, searched for them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_study import ToyEngine, ToyStudy, measured

from objectives.measurement import Failure, FailureKind, Stage
from tuner.config import EngineConfig
from tuner.display import config_text, outcome_text
from tuner.errors import StudyFileError
from tuner.export import FORMATS
from tuner.export.deployment import deployment
from tuner.identity import begin
from tuner.journal import Journal
from tuner.ledger import TrialRecord
from tuner.notify import notify
from tuner.report.html import write_report
from tuner.spec import Notify
from tuner.status import Status, summary
from tuner.study import StudyRun
from tuner.tracking import Tracker
from tuner.view import front_document, view
from tuner.watching import Watch

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

VARIABLE, ARGUMENT = "planted-battery-staple", "planted-hf-token-value"
SECRETS = (VARIABLE, ARGUMENT)
NEEDED = frozenset({"ledger.jsonl", "identity.json", "optuna.db"})
"""What a study goes on from holds what its engines are started with; the study's folder is closed to everybody else."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Path]:
    """A study with secrets that was run, tracked, reported, exported and told about; one of its engines printed one."""
    root = tmp_path_factory.mktemp("planted")
    env = {"DB_PASSWORD": VARIABLE, "HF_HUB_OFFLINE": "1"}
    toy = ToyStudy.at(root / "studies", engine={"args": {"hf_token": ARGUMENT}, "env": env})
    failure = Failure(FailureKind.CRASHED, Stage.RUN, f"the hub refused DB_PASSWORD={VARIABLE}")

    def script(config: EngineConfig, call: int) -> object:
        log = toy.folder.trial(call) / "engine.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"Using env vars DB_PASSWORD={VARIABLE}, hf_token={ARGUMENT}\n{failure.message}\n")
        return failure if call in (2, 3) else measured(config)

    journal = Journal(toy.folder.path, env)
    watch = Watch(toy.file, toy.folder, toy.heard, journal)
    run = toy.open(ToyEngine(script), trials=4)  # type: ignore[arg-type]  # a failure or a measurement
    base = EngineConfig({"model": "org/model", "hf_token": ARGUMENT}, env)
    rooms = dataclasses.replace(run._rooms, listener=watch, base=base)
    ending = StudyRun(rooms, trials=4, deadline=None).run()
    begin(toy.file, toy.folder, rooms.workload, "0.32.0")
    shown = view(toy.history, toy.file_objectives)
    shutil.copy(empty_database, root / "mlflow.db")
    Tracker(toy.file_objectives, uri=f"sqlite:///{root / 'mlflow.db'}", artifact_root=root / "artifacts").sync(
        dataclasses.replace(toy.history, header=_header(toy)), toy.folder.path, live=False
    )
    (root / "report").mkdir()
    write_report(shown, toy.folder.path, root / "report")
    for name, render in FORMATS.items():
        for file, text in render(deployment(shown, _best(toy), defaults={})).items():
            (root / f"{name}-{file}").write_text(text)
    status = Status(toy.file, shown, toy.history, toy.folder, running=False)
    outcomes = [outcome_text(trial, toy.file_objectives) for trial in toy.trials]
    (root / "said.txt").write_text("\n".join([*status.lines(), *outcomes, *toy.heard.notes, ending.text, _shown()]))
    (root / "status.json").write_text(json.dumps([status.document(), front_document(shown)]))
    program = f"import sys; open({str(root / 'notified.json')!r}, 'w').write(sys.stdin.read())"
    document = summary("toy", shown, code="failed", text=failure.message, hours=1.0)
    notify(Notify(command=(sys.executable, "-c", program)), document, env, print)
    yield root
    shutil.rmtree(root)


def _shown() -> str:
    return config_text({"env.DB_PASSWORD": VARIABLE, "hf_token": ARGUMENT, "max_num_seqs": 4})


def _header(toy: ToyStudy) -> object:
    header = toy.history.header
    assert header is not None
    return header


def _best(toy: ToyStudy) -> TrialRecord:
    shown = view(toy.history, toy.file_objectives)
    return shown.trial(shown.front[0])


def test_no_secret_is_in_anything_that_is_shown_kept_for_others_or_sent(place: Path) -> None:
    written = [path for path in place.rglob("*") if path.is_file() and path.name not in NEEDED]
    own_log = {path for path in written if path.name == "engine.log" and path.is_relative_to(place / "studies")}

    found = [
        (path.relative_to(place).as_posix(), secret)
        for path in written
        if path not in own_log
        for secret in SECRETS
        if secret.encode() in path.read_bytes()
    ]

    assert len(written) > 40
    assert {"mlflow.db", "log.jsonl", "report.html", "notified.json"} <= {path.name for path in written}
    assert found == []


def test_what_must_hold_secrets_is_closed_to_everybody_else(place: Path) -> None:
    study = place / "studies" / "toy"

    assert VARIABLE in (study / "ledger.jsonl").read_text()
    assert study.stat().st_mode & 0o077 == 0
    assert (study / "ledger.jsonl").stat().st_mode & 0o077 == 0
    assert (study / "identity.json").stat().st_mode & 0o077 == 0


def test_change_of_a_secret_is_told_without_either_value(place: Path) -> None:
    toy = ToyStudy(ToyStudy.at(place / "other").folder, {"engine": {"env": {"DB_PASSWORD": VARIABLE}}})
    begin(toy.file, toy.folder, toy.open(ToyEngine())._rooms.workload, "0.32.0")
    changed = dataclasses.replace(toy, changes={"engine": {"env": {"DB_PASSWORD": ARGUMENT}}})

    with pytest.raises(StudyFileError, match=r"engine\.env\.DB_PASSWORD was \*\*\* and is \*\*\*") as refused:
        begin(changed.file, changed.folder, changed.open(ToyEngine())._rooms.workload, "0.32.0")

    assert not any(secret in str(refused.value) for secret in SECRETS)


@pytest.mark.parametrize("kind", FORMATS)
def test_export_says_that_the_models_own_code_runs(kind: str) -> None:
    import export_samples

    trusting = dataclasses.replace(export_samples.plain(), args={"trust_remote_code": True, "max_num_seqs": 8})

    texts = "".join(FORMATS[kind](trusting).values())

    assert "trust_remote_code" in texts or "trust-remote-code" in texts
