from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from toy_study import (
    BUSY,
    CHUNKS,
    DEFAULTS,
    OOM,
    REQUESTS,
    SEQS,
    Heard,
    Outcome,
    ToyEngine,
    ToyStudy,
    args_of,
    exact_front,
    measured,
    oom_beyond,
    served,
    void,
)

from objectives.measurement import Failure, FailureKind, Measurement, Stage
from objectives.memory import UNKNOWN_SHORTAGE
from tuner import study as loop
from tuner.config import EngineConfig
from tuner.errors import StudyStoppedError
from tuner.ledger import History, TrialRecord, TrialState
from tuner.memory_model import MemoryPrediction
from tuner.view import view

REFUSED_FROM = 4096


def key(record: TrialRecord) -> tuple[int, int]:
    args = args_of(record.config)
    return args["max_num_seqs"], args["max_num_batched_tokens"]


def counted(records: tuple[TrialRecord, ...]) -> list[TrialRecord]:
    return [t for t in records if t.engine_s > 0 and t.repeats is None]


# The whole of it ----------------------------------------------------------------------------------------------------


def test_loop_finds_the_exact_front_of_the_toy_and_ends_when_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REFUSALS_IN_A_ROW", 25)
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()

    ending = study.run(engine, trials=100)

    everything = view(study.history, study.file_objectives)
    assert {key(everything.trial(number)) for number in everything.front} == exact_front()
    assert ending.code == "exhausted"
    assert set(map(key, study.trials)) == set(itertools.product(SEQS, CHUNKS))
    assert len(engine.runs) == 1 + len(SEQS) * len(CHUNKS)  # the defaults as such, and spelt out


def test_gp_finds_the_front_of_the_toy_in_fewer_trials_than_there_are_configurations(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, search={"sampler": "gp", "startup_trials": 5, "seed": 1})

    study.run(ToyEngine(), trials=8)

    everything = view(study.history, study.file_objectives)
    assert [t.source for t in study.trials][-1] == "sampler"
    assert len(exact_front() & {key(everything.trial(n)) for n in everything.front}) >= 3


def test_larger_study_runs_to_its_budget_with_the_reference_again_every_ten_trials(tmp_path: Path) -> None:
    space = {"max_num_seqs": {"low": 1, "high": 64}, "max_num_batched_tokens": {"low": 64, "high": 8192, "log": True}}
    study = ToyStudy.in_memory(tmp_path, space=space, noise={"aa_runs": 1, "sentinel_every": 10})

    ending = study.run(ToyEngine(), trials=30)

    assert ending.code == "budget"
    assert len(counted(study.trials)) == 30
    assert sum(t.source == "sentinel" for t in study.trials) == 3


def test_reference_is_trial_0_with_nothing_set_and_later_trials_fill_the_space(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()

    ending = study.run(engine, trials=5)

    first = study.trials[0]
    assert (first.number, first.source, first.state) == (0, "reference", TrialState.COMPLETE)
    assert first.config == EngineConfig({"model": "org/model"})
    assert [t.source for t in study.trials][1:3] == ["design", "design"]
    assert ending.text == "5 of 5 trials are done"
    assert [record.number for record in study.heard.records] == [t.number for t in study.trials]
    assert study.woken == len(study.trials)
    assert study.heard.stages == ["run 1/1"] * 5


def test_every_trial_measures_with_token_ids_of_its_own_and_logs_into_its_own_folder(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, measure={"repeats": 3, "start_budget_s": 7.0})
    engine = ToyEngine(lambda config, call: BUSY if call == 1 else oom_beyond(config, call))

    study.run(engine, trials=4)

    plans = [plan for _, plan in engine.runs]
    assert len({plan.salt for plan in plans}) == len(plans)
    assert {(plan.repeats, plan.start_budget_s) for plan in plans} == {(3, 7.0)}
    logs = [plan.log_path for plan in plans if plan.log_path is not None]
    assert [log.parent.name for log in logs] == ["0", "1", "1", "2", "3"]


# Out of memory ------------------------------------------------------------------------------------------------------


def test_out_of_memory_is_told_as_violation_and_never_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REFUSALS_IN_A_ROW", 12)
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()

    study.run(engine, trials=40)

    failed = [t for t in study.trials if t.failure == OOM]
    assert failed
    told = study.told()
    for record in failed:
        assert record.state is TrialState.INFEASIBLE
        assert record.score is not None
        assert record.score.violations == {"memory": 3.0}
        assert told[record.number] == ("COMPLETE", 3.0)
    ran = [config.key() for config, _ in engine.runs]
    assert len(ran) == len(set(ran))


def test_reference_that_runs_out_of_memory_is_a_result_and_the_study_goes_on(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: OOM if call == 0 else measured(config))

    study.run(engine, trials=3)
    study.run(engine, trials=4)

    assert [t.state for t in study.trials] == [TrialState.INFEASIBLE] + [TrialState.COMPLETE] * 3
    assert [t.source for t in study.trials].count("reference") == 1


def test_configuration_that_vllm_refuses_at_the_start_is_infeasible_without_a_memory_violation(tmp_path: Path) -> None:
    invalid = Failure(FailureKind.INVALID_CONFIG, Stage.CONFIG, "no such dtype")
    study = ToyStudy.in_memory(tmp_path)

    study.run(ToyEngine(lambda config, call: invalid if call == 1 else measured(config)), trials=2)

    record = study.trials[1]
    assert record.state is TrialState.INFEASIBLE
    assert record.score is not None
    assert "memory" not in record.score.violations
    assert study.told()[1] == ("COMPLETE", UNKNOWN_SHORTAGE)
    assert len(record.attempts) == 0


def test_trial_beyond_a_constraint_is_infeasible_with_its_values(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, constraints=["ttft_p95_s <= 1"])

    study.run(ToyEngine(lambda config, _: measured(config)), trials=4)

    told = study.told()
    for record in study.trials:
        assert record.score is not None
        assert (record.state is TrialState.COMPLETE) == (record.score.values["ttft_p95_s"] <= 1)
        assert told[record.number][0] == "COMPLETE"
    assert {t.state for t in study.trials} == {TrialState.COMPLETE, TrialState.INFEASIBLE}


# The machine --------------------------------------------------------------------------------------------------------


def test_failure_of_the_machine_is_retried_and_not_held_against_the_configuration(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: BUSY if call == 1 else measured(config))

    study.run(engine, trials=3)

    record = study.trials[1]
    assert record.state is TrialState.COMPLETE
    assert [attempt.failure for attempt in record.attempts] == [BUSY]
    assert [c.key() for c, _ in engine.runs[1:3]] == [record.config.key()] * 2
    assert record.engine_s >= record.attempts[0].seconds


def test_machine_that_fails_a_configuration_twice_costs_no_budget_and_tells_optuna_nothing(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    hung = Failure(FailureKind.HUNG, Stage.RUN, "no progress")
    engine = ToyEngine(lambda config, call: hung if call in (1, 2) else measured(config))

    study.run(engine, trials=3)

    record = study.trials[1]
    assert (record.state, record.failure) == (TrialState.FAILED, hung)
    assert len(record.attempts) == 1
    assert study.told()[1] == ("FAIL", None)
    assert sum(t.state is TrialState.COMPLETE for t in study.trials) == 3


def test_three_failures_of_the_machine_in_a_row_stop_the_study_with_the_reason(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: BUSY if call >= 2 else measured(config))

    with pytest.raises(StudyStoppedError, match=r"failed 3 times in a row, last with memory_not_free \(another proc"):
        study.run(engine, trials=8)

    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2 + [TrialState.FAILED] * 2
    assert len(engine.runs) == 2 + 3
    assert study.history.notes[-1].code == "machine"
    assert study.proposer().open_trials() == []


def test_success_between_failures_of_the_machine_starts_the_count_again(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: BUSY if call % 3 else measured(config))

    ending = study.run(engine, trials=3)

    assert ending.code == "budget"


def test_reference_that_the_machine_failed_is_measured_after_it_was_mended(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    with pytest.raises(StudyStoppedError):
        study.run(ToyEngine(lambda *_: BUSY))

    study.run(ToyEngine(), trials=3)

    reference = study.history.reference
    assert reference is not None
    assert reference.state is TrialState.COMPLETE
    assert reference.config == EngineConfig({"model": "org/model"})
    assert study.told()[reference.number][0] == "COMPLETE"


def test_recipe_that_the_machine_failed_is_measured_after_it_was_mended(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    study.proposer().enqueue("recipe:low-latency", {"max_num_seqs": 4}, DEFAULTS)
    with pytest.raises(StudyStoppedError):
        study.run(ToyEngine(lambda config, call: BUSY if call else measured(config)))

    study.run(ToyEngine(), trials=3)

    recipes = [t for t in study.trials if t.source == "recipe:low-latency"]
    assert [t.state for t in recipes] == [TrialState.FAILED, TrialState.COMPLETE]


# Void ---------------------------------------------------------------------------------------------------------------


def test_void_measurement_is_tried_once_more_and_the_good_one_counts(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: void(config) if call == 1 else measured(config))

    study.run(engine, trials=3)

    record = study.trials[1]
    assert record.state is TrialState.COMPLETE
    assert [attempt.void for attempt in record.attempts] == [("foreign_process",)]


def test_measurement_that_is_void_twice_is_kept_as_void_and_tells_optuna_nothing(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: void(config) if call in (1, 2) else measured(config))

    study.run(engine, trials=4)

    record = study.trials[1]
    assert record.state is TrialState.VOID
    assert record.score is not None
    assert record.score.values["ttft_p95_s"] > 0
    assert study.told()[1] == ("FAIL", None)
    assert len(counted(study.trials)) == 4


def test_void_reference_is_measured_again_before_the_study_goes_on(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(lambda config, call: void(config) if call < 2 else measured(config))

    study.run(engine, trials=4)

    assert [t.source for t in study.trials][:3] == ["reference", "reference", "design"]
    assert study.history.reference == study.trials[1]


def test_reference_that_stays_void_is_given_up_after_three_trials(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine(
        lambda config, _: void(config) if config == EngineConfig({"model": "org/model"}) else measured(config)
    )

    study.run(engine, trials=6)

    assert [t.source for t in study.trials].count("reference") == 3


# The gate -----------------------------------------------------------------------------------------------------------


def prediction(violation: float) -> MemoryPrediction:
    return MemoryPrediction(
        total_gib=48.0, budget_gib=43.2, weights_gib=15.0, activation_gib=1.0, non_torch_gib=0.3, graphs_gib=0.5,
        kv_gib=1.0, kv_tokens=1000, kv_tokens_needed=4000, kv_bytes_per_token=2**20, longest_fitting_tokens=1000,
        fits=violation <= 0, violation=violation, violation_interval=(violation, violation), intervals={},
        exact=frozenset(), measured=frozenset(), graphs_charged=True,
    )  # fmt: skip


def too_large(config: EngineConfig) -> MemoryPrediction:
    return prediction(0.4 if args_of(config)["max_num_batched_tokens"] >= REFUSED_FROM else -0.5)


def is_too_large(config: EngineConfig) -> bool:
    return bool(args_of(config)["max_num_batched_tokens"] >= REFUSED_FROM)


def test_what_the_gate_refuses_is_recorded_told_as_violation_and_costs_no_budget(tmp_path: Path) -> None:
    study = dataclasses.replace(ToyStudy.in_memory(tmp_path, gate={"memory": "refuse"}), predict=too_large)
    engine = ToyEngine(lambda config, _: measured(config))

    study.run(engine, trials=6)

    refused = [t for t in study.trials if t.failure is not None]
    assert refused
    told = study.told()
    for record in refused:
        assert record.state is TrialState.INFEASIBLE
        assert record.failure is not None
        assert (record.failure.kind, record.failure.stage) == (FailureKind.OOM_KV_CACHE, Stage.GATE)
        assert record.engine_s == 0
        assert record.score is not None
        assert told[record.number] == ("COMPLETE", record.score.violations["memory"])
        assert record.score.violations["memory"] > 0
    assert not any(is_too_large(config) for config, _ in engine.runs)
    assert len(engine.runs) == 6


def test_study_in_which_the_gate_refuses_everything_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REFUSALS_IN_A_ROW", 7)
    study = dataclasses.replace(
        ToyStudy.in_memory(tmp_path, gate={"memory": "refuse"}), predict=lambda _: prediction(1.0)
    )
    engine = ToyEngine()

    ending = study.run(engine)

    assert (ending.code, engine.runs) == ("exhausted", [])
    assert study.history.notes[-1].text == ending.text


def test_verify_starts_one_refused_configuration_and_refuses_the_like_once_it_proved_right(tmp_path: Path) -> None:
    study = dataclasses.replace(ToyStudy.in_memory(tmp_path, gate={"memory": "verify"}), predict=too_large)
    engine = ToyEngine(lambda config, _: OOM if is_too_large(config) else measured(config))

    study.run(engine, trials=8)

    assert sum(is_too_large(config) for config, _ in engine.runs) == 1
    assert sum(is_too_large(t.config) and t.engine_s == 0 for t in study.trials) >= 1
    assert next(n.text for n in study.history.notes if n.code == "gate").endswith("the like is refused from now on")


def test_verify_refuses_nothing_any_more_once_a_refused_configuration_ran(tmp_path: Path) -> None:
    study = dataclasses.replace(ToyStudy.in_memory(tmp_path, gate={"memory": "verify"}), predict=too_large)
    engine = ToyEngine(lambda config, _: measured(config))

    study.run(engine, trials=8)

    assert sum(is_too_large(config) for config, _ in engine.runs) >= 2
    assert all(t.engine_s > 0 for t in study.trials)
    assert next(n.text for n in study.history.notes if n.code == "gate").endswith("it refuses nothing any more")


def test_verify_learns_nothing_from_a_failure_of_the_machine(tmp_path: Path) -> None:
    largest = {"max_num_seqs": 16, "max_num_batched_tokens": 4096}

    def refuse_largest(config: EngineConfig) -> MemoryPrediction:
        return prediction(0.4 if args_of(config)["max_num_seqs"] == 16 and is_too_large(config) else -0.5)

    study = dataclasses.replace(ToyStudy.in_memory(tmp_path, gate={"memory": "verify"}), predict=refuse_largest)
    study.proposer().enqueue("operator", largest, DEFAULTS)

    study.run(ToyEngine(lambda config, call: BUSY if call in (1, 2) else measured(config)), trials=2)

    assert study.trials[1].state is TrialState.FAILED
    assert study.trials[1].params == largest
    assert not [n for n in study.history.notes if n.code == "gate"]


# Known configurations -----------------------------------------------------------------------------------------------


def test_known_configuration_is_told_again_and_not_run_again(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()
    study.run(engine, trials=2)
    known = study.trials[1]
    proposer = study.proposer()
    proposer.enqueue("operator", known.params, DEFAULTS)

    study.run(engine, trials=3)

    assert study.told()[2][0] == study.told()[1][0]
    assert [t.number for t in study.trials] == [0, 1, 3]
    assert len(engine.runs) == 3


def test_defaults_spelt_out_are_another_configuration_until_vllm_says_otherwise(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    study.proposer().enqueue("operator", DEFAULTS, DEFAULTS)
    engine = ToyEngine()

    study.run(engine, trials=2)

    assert len(engine.runs) == 2


# Interruption -------------------------------------------------------------------------------------------------------


def facts(study: ToyStudy) -> list[tuple[Any, ...]]:
    """What a ledger says of finished trials, without times."""
    return [
        (t.number, t.state, t.source, t.params, t.config, t.score, t.failure and t.failure.kind, t.repeats)
        for t in study.history.finished
    ]


SEARCH = {"sampler": "tpe", "startup_trials": 3, "seed": 5}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> ToyStudy:
    study = ToyStudy.in_memory(
        tmp_path_factory.mktemp("whole"), search=SEARCH, noise={"aa_runs": 1, "sentinel_every": 4}
    )
    study.run(ToyEngine(), trials=8)
    return study


def begin(path: Path) -> ToyStudy:
    return ToyStudy.in_memory(path, search=SEARCH, noise={"aa_runs": 1, "sentinel_every": 4})


@pytest.mark.parametrize("at", [0, 5])
def test_interrupted_trial_is_run_again_under_its_number_and_what_follows_is_the_same(
    tmp_path: Path, uninterrupted: ToyStudy, at: int
) -> None:
    study = begin(tmp_path)

    def once(config: EngineConfig, call: int) -> Outcome:
        return KeyboardInterrupt() if call == at else oom_beyond(config, call)

    with pytest.raises(KeyboardInterrupt):
        study.run(ToyEngine(once), trials=8)

    left = study.trials[-1]
    assert left.failure is not None
    assert (left.state, left.failure.kind) == (TrialState.FAILED, FailureKind.INTERRUPTED)
    assert [p.number for p in study.proposer().open_trials()] == [left.number]

    study.run(ToyEngine(), trials=8)
    assert facts(study) == facts(uninterrupted)


class HitInFinalizer(Heard):
    """Ctrl-C comes while a finalizer runs, from which Python lets no exception out."""

    def finished(self, record: TrialRecord, history: History) -> None:
        super().finished(record, history)

        class Finalized:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0)

        if record.number == 2:
            Finalized()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_python_dropped_in_a_finalizer_ends_the_study_all_the_same(tmp_path: Path) -> None:
    study = begin(tmp_path)
    study.heard = HitInFinalizer()
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        study.run(ToyEngine(), trials=8)

    assert [t.number for t in study.trials] == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is before


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the loop may react to it."""


@pytest.mark.parametrize("method", ["tell_measured", "tell_violation"])
def test_killed_between_ledger_and_optuna_the_next_run_tells_it_from_the_ledger(
    tmp_path: Path, uninterrupted: ToyStudy, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    study = begin(tmp_path)
    run = study.open(ToyEngine(), trials=8)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(run._rooms.proposer, method, kill)
    with pytest.raises(Killed):
        run.run()
    left = study.trials[-1]
    assert left.state in (TrialState.COMPLETE, TrialState.INFEASIBLE)
    assert study.told()[left.number][0] == "RUNNING"

    engine = ToyEngine()
    study.run(engine, trials=8)

    assert study.told()[left.number][0] == "COMPLETE"
    assert left.config.key() not in [config.key() for config, plan in engine.runs if plan.salt == 2 * left.number]
    assert facts(study) == facts(uninterrupted)


def test_killed_in_the_middle_of_a_trial_the_running_line_is_replaced(tmp_path: Path, uninterrupted: ToyStudy) -> None:
    study = begin(tmp_path)
    with pytest.raises(Killed):
        study.run(ToyEngine(lambda config, call: Killed() if call == 3 else oom_beyond(config, call)), trials=8)
    assert study.trials[-1].state is TrialState.RUNNING

    study.run(ToyEngine(), trials=8)

    assert facts(study) == facts(uninterrupted)


def test_trial_killed_before_it_was_described_is_closed_and_the_study_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ToyStudy.in_memory(tmp_path, search={"sampler": "random", "startup_trials": 1})
    run = study.open(ToyEngine(), trials=4)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("tuner.proposer.attributes_of", kill)
        with pytest.raises(Killed):
            run.run()

    ending = study.run(ToyEngine(), trials=4)

    assert ending.code == "budget"
    assert "RUNNING" not in {state for state, _ in study.told().values()}


def test_finished_study_runs_nothing_more_and_goes_on_with_a_larger_budget(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()
    study.run(engine, trials=3)
    study.run(engine, trials=3)
    assert len(engine.runs) == 3

    study.run(engine, trials=5)

    assert len(engine.runs) == 5


# Ends ---------------------------------------------------------------------------------------------------------------


def test_first_trial_is_not_refused_on_a_guess_of_how_long_it_takes(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()

    study.run(engine, trials=1, deadline=time.time() + 60)

    assert len(engine.runs) >= 1


def test_nothing_is_begun_in_the_time_that_is_kept_for_the_end(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    engine = ToyEngine()

    ending = study.run(engine, deadline=time.time() + 20)

    assert ending.code == "deadline"
    assert engine.runs == []


def test_noise_floor_is_measured_also_where_the_first_trials_use_up_the_budget(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, recipes=("low-latency",), noise={"aa_runs": 1})
    engine = ToyEngine()

    study.run(engine, trials=1)

    assert [t.source for t in study.trials][-1] == "sentinel"


def test_deadline_is_judged_by_the_trials_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = ToyStudy.in_memory(tmp_path)
    clock = [1000.0]
    monkeypatch.setattr(loop.time, "time", lambda: clock[0])
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])

    def hundred_seconds(config: EngineConfig, call: int) -> Outcome:
        clock[0] += 100
        return measured(config)

    ending = study.run(ToyEngine(hundred_seconds), trials=50, deadline=1000.0 + 650)

    assert ending.code == "deadline"
    assert len(study.trials) == 6
    assert clock[0] <= 1650
    assert all(t.engine_s == 100 for t in study.trials)


def test_listener_is_told_how_many_trials_and_when_it_ends(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)

    study.run(ToyEngine(), trials=2)

    assert [p.number for p in study.heard.begun] == [0, 1]
    assert study.heard.notes == ["2 of 2 trials are done"]


# Repeats ------------------------------------------------------------------------------------------------------------


def test_reference_is_measured_again_for_the_noise_and_later_to_see_drift(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, noise={"aa_runs": 2, "sentinel_every": 3})
    engine = ToyEngine(lambda config, _: measured(config))

    study.run(engine, trials=8)

    sources = [t.source for t in study.trials]
    assert sources[:3] == ["reference", "sentinel", "sentinel"]
    assert sources.count("sentinel") == 4
    told = study.told()
    for record in study.trials:
        if record.source == "sentinel":
            assert record.repeats == 0
            assert record.config == study.trials[0].config
            assert told[record.number] == ("FAIL", None)
    assert len(counted(study.trials)) == 8
    assert view(study.history, study.file_objectives).noise == {"ttft_p95_s": 0.0, "tpot_p95_s": 0.0}


def test_machine_that_slows_down_is_noticed_and_the_trials_since_are_in_doubt(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, noise={"aa_runs": 1, "sentinel_every": 3})
    slow = tuple(served(i, 3.0, 0.2) for i in range(REQUESTS))
    engine = ToyEngine(lambda config, call: measured(config, **({"requests": slow} if call >= 5 else {})))

    study.run(engine, trials=5)

    sentinels = [t.number for t in study.trials if t.source == "sentinel"]
    doubted = [t.number for t in study.trials if sentinels[0] < t.number < sentinels[1]]
    assert view(study.history, study.file_objectives).in_doubt == set(doubted)
    assert any("changed by" in note and "in doubt" in note for note in study.heard.notes)


def test_queued_recipes_go_before_the_noise_is_measured(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, noise={"aa_runs": 1, "sentinel_every": 0})
    study.proposer().enqueue("recipe:chat", {"max_num_seqs": 4, "max_model_len": 4096}, DEFAULTS)

    study.run(ToyEngine(), trials=3)

    assert [t.source for t in study.trials] == ["reference", "recipe:chat", "sentinel", "design"]
    assert study.trials[1].params == {"max_num_seqs": 4, "max_num_batched_tokens": None, "max_model_len": 4096}


# Judging ------------------------------------------------------------------------------------------------------------


def slow_machine(config: EngineConfig, call: int) -> Measurement:
    """From the second trial on the machine takes twice as long for everything."""
    base = measured(config)
    if call == 0:
        return base
    probe = dataclasses.replace(base.speed_before, prefill_s=0.8, decode_step_s=0.1)  # type: ignore[type-var]  # is set
    return dataclasses.replace(base, speed_before=probe, speed_after=probe)


WHOLE_PROBES = {"max_num_seqs": [1, 4, 16], "max_num_batched_tokens": [512, 1024, 4096]}
"""No prompt of the speed probe is cut into pieces."""


def test_drift_is_corrected_against_the_reference_also_after_reopening(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, measure={"drift": "correct"}, space=WHOLE_PROBES)
    study.run(ToyEngine(slow_machine), trials=2)
    study.run(ToyEngine(lambda config, _: slow_machine(config, 1)), trials=3)

    scores = [t.score.values for t in study.trials if t.score is not None]
    assert [s["speed_index"] for s in scores] == pytest.approx([1.0, 2.0, 2.0])
    assert all(s["ttft_p95_s_corrected"] == pytest.approx(s["ttft_p95_s"] / s["speed_index"]) for s in scores)


def test_drift_is_corrected_against_the_first_measurement_where_the_defaults_do_not_fit(tmp_path: Path) -> None:
    too_large = Failure(FailureKind.OOM_KV_CACHE, Stage.KV_CACHE, "does not fit")
    study = ToyStudy.in_memory(tmp_path, measure={"drift": "correct"}, space=WHOLE_PROBES)

    study.run(ToyEngine(lambda config, call: too_large if call == 0 else slow_machine(config, call - 1)), trials=3)

    scores = [t.score.values for t in study.trials if t.score is not None and t.engine is not None]
    assert [s["speed_index"] for s in scores[:2]] == pytest.approx([1.0, 2.0])


def test_speed_of_a_trial_that_cuts_the_probe_into_pieces_is_not_known(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, space={"max_num_seqs": [1, 4, 16], "max_num_batched_tokens": [64, 1024]})

    study.run(ToyEngine(slow_machine), trials=6)

    later = [(t.params["max_num_batched_tokens"], t.score.values) for t in study.trials[1:] if t.score is not None]
    assert {chunk for chunk, _ in later} == {64, 1024}
    assert all(("speed_index" in values) == (chunk == 1024) for chunk, values in later)


def test_metric_of_the_operators_own_that_fails_voids_the_trial_with_its_cause(tmp_path: Path) -> None:
    def broken(_: Measurement) -> float:
        raise ZeroDivisionError("no requests")

    study = dataclasses.replace(
        ToyStudy.in_memory(tmp_path, objectives=["ttft_p95_s", {"metric": "own:cost", "direction": "minimize"}]),
        user_metrics={"own:cost": broken},
    )

    study.run(ToyEngine(lambda config, _: measured(config)), trials=1)

    record = study.trials[0]
    assert record.state is TrialState.VOID
    assert record.score is not None
    assert "own:cost raised ZeroDivisionError: no requests" in [reason.evidence for reason in record.score.void]
