from __future__ import annotations

from pathlib import Path

from toy_study import ToyEngine, ToyStudy, measured

from objectives.measurement import Failure, FailureKind, Stage
from tuner.ledger import TrialState
from tuner.view import view

BOUNDS = {"ttft_p95_s": 90.0, "tpot_p95_s": 9.0}
BEATEN = Failure(FailureKind.DOMINATED, Stage.RUN, "after 3 of 20 requests it is beaten by trial 0", at_least=BOUNDS)


def test_runs_are_held_against_the_front_only_where_the_study_says_so(tmp_path: Path) -> None:
    plans = {}
    for end_dominated in (False, True):
        study = ToyStudy.in_memory(
            tmp_path / str(end_dominated), search={"sampler": "random", "end_dominated": end_dominated}
        )
        engine = ToyEngine(lambda config, _: measured(config))
        study.run(engine, trials=4)
        plans[end_dominated] = [plan.bars for _, plan in engine.runs]

    assert not any(plans[False])
    assert plans[True][0] == ()
    assert [one.trial for one in plans[True][1]] == [0]
    assert all(one.limits["ttft_p95_s"] >= 1.2 * one.values["ttft_p95_s"] for one in plans[True][3])


def test_what_is_measured_again_on_purpose_is_measured_to_its_end(tmp_path: Path) -> None:
    search = {"sampler": "random", "end_dominated": True}
    study = ToyStudy.in_memory(
        tmp_path, search=search, noise={"aa_runs": 1, "sentinel_every": 2}, confirm={"rounds": 1}
    )
    engine = ToyEngine(lambda config, _: measured(config))

    study.run(engine, trials=5)

    repeated = [plan for (_, plan), t in zip(engine.runs, study.trials, strict=True) if t.repeats is not None]
    assert repeated
    assert not any(plan.bars for plan in repeated)


def test_run_that_was_ended_early_is_censored_and_told_with_its_bounds(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, search={"sampler": "random", "end_dominated": True})
    engine = ToyEngine(lambda config, call: BEATEN if call == 1 else measured(config))

    study.run(engine, trials=4)

    record = study.trials[1]
    assert (record.state, record.failure, record.score, record.attempts) == (TrialState.CENSORED, BEATEN, None, ())
    assert study.told()[1] == ("COMPLETE", 0.0)
    everything = view(study.history, study.file_objectives)
    assert 1 not in everything.results
    assert sum(t.engine_s > 0 for t in study.trials) == 4
    ran = [config.key() for config, _ in engine.runs]
    assert len(ran) == len(set(ran))
