from __future__ import annotations

import json
from dataclasses import replace

import pytest
from study_samples import sample_history, sample_verification

from objectives import pareto
from objectives.measurement import Failure, FailureKind, Stage
from tuner.ledger import History, TrialRecord, TrialState
from tuner.view import Objective, StudyView, front_document, hypervolume, hypervolume_series, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))


def sample_view(trials: int = 30) -> StudyView:
    return view(sample_history(trials), OBJECTIVES)


def with_trials(history: History, *trials: TrialRecord) -> History:
    return replace(history, trials=(*history.trials, *trials))


def again(trial: TrialRecord, number: int, factor: float) -> TrialRecord:
    assert trial.score is not None
    values = {name: value * factor for name, value in trial.score.values.items()}
    return replace(
        trial, number=number, source="confirm", repeats=trial.number, score=replace(trial.score, values=values)
    )


def test_the_front_holds_complete_trials_only() -> None:
    study = sample_view()
    assert study.front
    assert {study.trial(n).state for n in study.front} == {TrialState.COMPLETE}


def test_no_complete_trial_dominates_a_member_of_the_front() -> None:
    study = sample_view()
    rows = {n: [r.values[o.name] for o in OBJECTIVES] for n, r in study.results.items()}
    ways = [o.direction for o in OBJECTIVES]
    assert not any(pareto.dominates(rows[a], rows[b], ways) for a in rows for b in study.front)


def test_the_front_is_ordered_by_the_first_objective_and_holds_the_knee() -> None:
    study = sample_view()
    first = [study.results[n].values["ttft_p95_s"] for n in study.front]
    assert first == sorted(first)
    assert study.knee in study.front


def test_runners_up_are_those_that_noise_may_have_kept_from_the_front() -> None:
    study = sample_view()
    others = set(study.results) - set(study.front)

    assert replace(study, noise={}).runners_up == ()
    assert replace(study, noise={"ttft_p95_s": 0.0, "tpot_p95_s": 0.0}).runners_up == ()
    some = set(replace(study, noise={"ttft_p95_s": 0.1, "tpot_p95_s": 0.1}).runners_up)
    assert some < others
    assert some <= set(replace(study, noise={"ttft_p95_s": 0.3, "tpot_p95_s": 0.1}).runners_up)
    assert set(replace(study, noise={"ttft_p95_s": 1e3, "tpot_p95_s": 0.0}).runners_up) == others


def test_a_configuration_that_was_measured_again_stands_once_with_its_median() -> None:
    study = sample_view()
    reference, sentinel = study.trial(0), study.trial(20)
    assert reference.score is not None
    assert sentinel.score is not None
    assert 20 not in study.results
    expected = (reference.score.values["ttft_p95_s"] + sentinel.score.values["ttft_p95_s"]) / 2
    assert study.results[0].values["ttft_p95_s"] == pytest.approx(expected)
    assert study.results[0].measurements == 2


def test_repeated_measurements_give_the_noise_floor() -> None:
    assert sample_view(15).noise == {}
    assert set(sample_view().noise) == {"ttft_p95_s", "tpot_p95_s"}


def test_a_confirmation_out_of_memory_takes_the_configuration_off_the_front() -> None:
    history = sample_history()
    member = view(history, OBJECTIVES).trial(view(history, OBJECTIVES).front[0])
    failure = Failure(FailureKind.OOM_RUNTIME, Stage.RUN, "CUDA out of memory.")
    failed = replace(
        member, number=99, repeats=member.number, state=TrialState.INFEASIBLE, score=None, engine=None, failure=failure
    )
    assert member.number not in view(with_trials(history, failed), OBJECTIVES).results


def test_a_worse_confirmation_can_move_the_front() -> None:
    history = sample_history()
    best = view(history, OBJECTIVES).trial(view(history, OBJECTIVES).front[0])
    study = view(with_trials(history, again(best, 99, 5.0)), OBJECTIVES)
    assert study.results[best.number].values["ttft_p95_s"] == pytest.approx(3 * best.score.values["ttft_p95_s"])  # type: ignore[union-attr]
    assert 99 not in study.front


def test_the_reference_alone_has_a_hypervolume_of_one() -> None:
    study = sample_view()
    assert study.reference is not None
    assert study.reference.score is not None
    assert hypervolume([study.reference.score.values], study.reference, OBJECTIVES) == pytest.approx(1.0)


def test_hypervolume_never_falls_during_a_study() -> None:
    volumes = [volume for _, volume in hypervolume_series(sample_view())]
    assert volumes == sorted(volumes)
    assert volumes[0] == pytest.approx(1.0)


def test_more_is_better_where_the_objective_says_so() -> None:
    study = view(sample_history(), (Objective("requests_per_s", "1/s", "maximize"), Objective("tpot_p95_s", "s")))
    best = max(study.results.values(), key=lambda r: r.values["requests_per_s"])
    assert study.front[0] == best.number


def test_a_study_on_the_twin_is_predicted_and_a_measured_one_leaves_predictions_out() -> None:
    predicted = sample_history(predicted=True)
    assert view(predicted, OBJECTIVES).predicted
    assert view(predicted, OBJECTIVES).front
    measured = sample_history()
    mixed = replace(measured, trials=(*measured.trials[:10], *predicted.trials[10:]))
    assert not view(mixed, OBJECTIVES).predicted
    assert max(view(mixed, OBJECTIVES).front) < 10


def test_an_empty_history_has_an_empty_front() -> None:
    study = view(History(None, (), (), ()), OBJECTIVES)
    assert (study.front, study.knee, study.hypervolume, study.reference) == ((), None, None, None)
    assert front_document(study)["trials"] == []


def test_the_front_document_is_json_and_says_everything_about_a_trial() -> None:
    document = json.loads(json.dumps(front_document(sample_view()), allow_nan=False))
    assert {"study", "objectives", "reference", "hypervolume", "trials"} <= set(document)
    keys = {"number", "state", "params", "values", "intervals", "violations", "pareto", "knee", "failure"}
    assert all(keys <= set(trial) for trial in document["trials"])
    assert [t["number"] for t in document["trials"] if t["knee"]] == [sample_view().knee]
    assert document["trials"][3]["failure"] == {
        "kind": "oom_kv_cache",
        "stage": "gate",
        "message": "The KV cache would hold 0.4 of 4.0 GiB.",
    }


def test_members_of_the_front_that_the_noise_does_not_tell_apart_are_named_in_pairs() -> None:
    study = sample_view()
    front = study.front

    everything = replace(study, noise={o.name: 1e9 for o in OBJECTIVES})
    nothing = replace(
        study,
        noise={o.name: 0.0 for o in OBJECTIVES},
        results={n: replace(r, intervals={}) for n, r in study.results.items()},
    )

    assert everything.same_within_noise == tuple((a, b) for i, a in enumerate(front) for b in front[i + 1 :])
    assert nothing.same_within_noise == ()
    assert replace(study, noise={}).same_within_noise == ()
    assert front_document(everything)["same_within_noise"] == [list(pair) for pair in everything.same_within_noise]


def test_a_trial_is_verified_while_its_latest_verification_found_it_better() -> None:
    found = sample_verification(1)
    no_better = replace(found, verdict={"ttft_p95_s": "no difference", "tpot_p95_s": "worse"})

    once = view(replace(sample_history(), verifications=(found,)), OBJECTIVES)
    undone = view(replace(sample_history(), verifications=(found, no_better)), OBJECTIVES)

    assert once.is_verified(1)
    assert not once.is_verified(2)
    assert not undone.is_verified(1)
    assert undone.verification(1) == no_better


def test_the_defaults_are_verified_by_being_the_defaults_again() -> None:
    against_themselves = replace(sample_verification(0), verdict={"ttft_p95_s": "no difference"})

    assert view(replace(sample_history(), verifications=(against_themselves,)), OBJECTIVES).is_verified(0)


def test_the_front_document_says_what_is_verified() -> None:
    study = view(replace(sample_history(), verifications=(sample_verification(1),)), OBJECTIVES)

    trials = json.loads(json.dumps(front_document(study)))["trials"]

    assert [t["number"] for t in trials if t["verified"]] == [1]
    assert trials[1]["verification"]["verdict"]["ttft_p95_s"] == "better"
    assert trials[2]["verification"] is None
