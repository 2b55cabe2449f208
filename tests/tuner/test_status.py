from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from toy_study import ToyEngine, ToyStudy, measured

from tuner.engine.protocol import MeasurePlan
from tuner.ledger import TrialLine, TrialState
from tuner.night import Deadline, Limits
from tuner.status import Status, note_run, summary
from tuner.view import view


@pytest.fixture
def study(tmp_path: Path) -> ToyStudy:
    toy = ToyStudy.in_memory(tmp_path, confirm={"rounds": 1})
    toy.run(ToyEngine(lambda config, _: measured(config)), trials=3)
    return toy


def status_of(study: ToyStudy, *, running: bool) -> Status:
    history = study.history
    return Status(study.file, view(history, study.file_objectives), history, study.folder, running)


def test_study_that_runs_says_when_it_will_end_and_why(study: ToyStudy) -> None:
    note_run(study.folder, Limits(5, 0, 600.0), None)

    status = status_of(study, running=True)

    said = status.document()
    assert said["ends_at"] >= time.time()
    assert said["ends_because"].startswith("the budget: 2 more trials of about ")
    assert any(line.startswith("ends about ") and "the budget" in line for line in status.lines())
    assert said["ended"] is None


def test_study_that_runs_to_a_deadline_says_so(study: ToyStudy) -> None:
    note_run(study.folder, Limits(None, 0, 600.0), Deadline(at=time.time() + 3600))

    said = status_of(study, running=True).document()

    assert said["ends_because"].startswith("the deadline: ")
    assert said["ends_at"] <= time.time() + 3601


def test_study_that_is_over_says_why_it_ended(study: ToyStudy) -> None:
    status = status_of(study, running=False)

    assert status.document()["ended"]["code"] == "budget"
    assert status.document()["ends_at"] is None
    assert next(line for line in status.lines() if line.startswith("ended ")).endswith("3 of 3 trials are done")


def test_study_whose_search_has_converged_says_so(tmp_path: Path) -> None:
    converging = ToyStudy.in_memory(tmp_path, search={"startup_trials": 3, "stop_when_gain_below": 0.99})
    converging.run(ToyEngine(), trials=50)

    status = status_of(converging, running=False)

    assert status.document()["ended"]["code"] == "converged"
    assert any(line.startswith("ended ") and "stop_when_gain_below" in line for line in status.lines())


def test_run_that_has_not_said_its_limits_yet_promises_nothing(study: ToyStudy) -> None:
    (study.folder.path / "run.json").write_text('{"trials"')

    assert status_of(study, running=True).document()["ends_at"] is None


def test_trial_that_was_interrupted_is_said_to_be_run_again(study: ToyStudy) -> None:
    record = dataclasses.replace(study.trials[-1], number=9, state=TrialState.RUNNING, finished_at=None, score=None)
    study.folder.ledger.append(TrialLine(record))

    assert "trial 9 was interrupted and will be run again" in status_of(study, running=False).lines()
    assert "trial 9 runs" in status_of(study, running=True).lines()


def test_summary_is_json_with_the_front_and_how_it_ended(study: ToyStudy) -> None:
    shown = view(study.history, study.file_objectives)

    document = json.loads(json.dumps(summary("toy", shown, code="budget", text="done", hours=1.5)))

    assert (document["ending"], document["hours"]) == ("budget", 1.5)
    assert [entry["trial"] for entry in document["front"]] == list(shown.front)
    assert sum(entry["knee"] for entry in document["front"]) == 1


# The loop and the night ----------------------------------------------------------------------------------------------


def test_members_of_the_front_are_measured_again_before_the_study_ends(study: ToyStudy) -> None:
    confirmed = [t.repeats for t in study.trials if t.source == "confirm"]

    assert set(view(study.history, study.file_objectives).front) <= set(confirmed)
    assert len(confirmed) == len(set(confirmed))


def test_trial_that_the_deadline_ends_keeps_its_number_and_is_run_again(tmp_path: Path) -> None:
    from objectives.measurement import Failure, FailureKind, Stage

    toy = ToyStudy.in_memory(tmp_path)
    ended = Failure(FailureKind.INTERRUPTED, Stage.RUN, "the study's deadline came; the trial will be run again")
    engine = ToyEngine(lambda config, call: ended if call == 2 else measured(config))

    toy.run(engine, trials=4, deadline=time.time() + 3600)

    assert [t.number for t in toy.trials] == [0, 1, 2, 3]
    assert all(t.state is TrialState.COMPLETE for t in toy.trials)
    assert len(engine.runs) == 5
    plans: list[MeasurePlan] = [plan for _, plan in engine.runs]
    assert all(plan.end_by_s is not None and plan.end_by_s <= time.monotonic() + 3600 for plan in plans)
