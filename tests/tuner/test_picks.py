from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_samples import sample_history

from objectives.score import Score
from tuner.config import EngineConfig
from tuner.errors import PickError
from tuner.ledger import History, TrialRecord, TrialState
from tuner.picks import pick
from tuner.view import Objective, StudyView, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))


def trial(number: int, **values: float) -> TrialRecord:
    score = Score(values, {}, {"memory": -0.1})
    config = EngineConfig({"max_num_seqs": number})
    return TrialRecord(number, TrialState.COMPLETE, "sampler", {}, config, 0.0, 1.0, score)


def study(*rows: tuple[float, float], objectives: tuple[Objective, ...] = OBJECTIVES) -> StudyView:
    first, second = (o.name for o in objectives)
    trials = tuple(trial(i, **{first: a, second: b}) for i, (a, b) in enumerate(rows))
    return view(History(None, trials, (), ()), objectives)


FRONT = study((1.0, 0.10), (1.1, 0.05), (4.0, 0.04), (5.0, 0.05))
"""Trial 1 is the knee, trial 3 is dominated."""


def test_the_knee_is_the_default() -> None:
    assert pick(FRONT).number == pick(FRONT, "knee").number == FRONT.knee == 1


@pytest.mark.parametrize(
    ("text", "number"), [("min:ttft_p95_s", 0), ("min:tpot_p95_s", 2), ("max:ttft_p95_s", 3), ("min:tpot", 2)]
)
def test_least_and_most_of_a_metric(text: str, number: int) -> None:
    assert pick(FRONT, text).number == number


def test_of_equals_the_earliest_trial_is_picked() -> None:
    assert pick(study((2.0, 1.0), (1.0, 2.0), (1.0, 3.0)), "min:ttft").number == 1


def test_a_trial_by_its_number_whatever_became_of_it() -> None:
    sample = view(sample_history(), OBJECTIVES)

    assert pick(sample, "trial:10").state is TrialState.VOID


def test_a_running_trial_cannot_be_picked() -> None:
    sample = view(sample_history(), OBJECTIVES)

    with pytest.raises(PickError, match=r"trial:29: no such finished trial; the study has trials 0-28"):
        pick(sample, "trial:29")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("slo:ttft_p95_s<=2,tpot_p95_s<=0.08", 1),
        ("slo:ttft<=1.05", 0),
        ("slo: ttft <= 6 , tpot <= 0.045", 2),
        ("slo:ttft_p95_s>=4.5", 3),
    ],
)
def test_the_best_within_a_service_level(text: str, number: int) -> None:
    assert pick(FRONT, text).number == number


def test_a_service_level_that_nothing_keeps_says_how_near_the_study_comes() -> None:
    with pytest.raises(PickError, match=r"the best ttft_p95_s is 1, asked was ttft_p95_s<=0\.5"):
        pick(FRONT, "slo:ttft_p95_s<=0.5")


@pytest.mark.parametrize(
    ("text", "number"),
    [("weights:ttft=1,tpot=0", 0), ("weights:ttft_p95_s=0.05,tpot_p95_s=0.95", 2), ("weights:ttft=0.5,tpot=0.5", 1)],
)
def test_weights_choose_by_factors(text: str, number: int) -> None:
    assert pick(FRONT, text).number == number


def test_weights_turn_round_where_more_is_better() -> None:
    objectives = (Objective("output_tokens_per_s", "1/s", "maximize"), Objective("tpot_p95_s", "s"))
    shown = study((100.0, 0.05), (300.0, 0.06), objectives=objectives)

    assert pick(shown, "weights:output_tokens_per_s=1,tpot=1").number == 1


@given(st.floats(1e-3, 1e3), st.floats(0.01, 0.99))
def test_weights_do_not_depend_on_the_unit_of_a_metric(scale: float, weight: float) -> None:
    rows = ((1.0, 0.10), (1.1, 0.05), (4.0, 0.04))
    text = f"weights:ttft={weight},tpot={1 - weight}"
    scaled = study(*((a * scale, b) for a, b in rows))

    assert pick(scaled, text).number == pick(study(*rows), text).number


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_weights_never_pick_a_dominated_trial(rows: list[tuple[float, float]], weight: float) -> None:
    shown = study(*rows)
    chosen = pick(shown, f"weights:ttft={weight},tpot={1 - weight}")
    assert chosen.score is not None
    a, b = chosen.score.values["ttft_p95_s"], chosen.score.values["tpot_p95_s"]

    assert not any(x <= a and y <= b and x * 1.001 < a and y * 1.001 < b for x, y in rows)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the forms are knee, min:METRIC"),
        ("knie", "did you mean 'knee'"),
        ("knee:3", "the forms are"),
        ("min", "the forms are"),
        ("trial:", "the forms are"),
        ("trial:x", "the study has trials 0-3"),
        ("trial:17", "the study has trials 0-3"),
        ("min:ttft_p59_s", "did you mean 'ttft_p95_s'"),
        ("min:", "the forms are"),
        ("slo:ttft_p95_s<2", "write it as METRIC<=NUMBER"),
        ("slo:ttft_p95_s<=fast", "write it as METRIC<=NUMBER"),
        ("slo:ttft_p95_s<=nan", "write it as METRIC<=NUMBER"),
        ("weights:ttft=-1", "not below 0"),
        ("weights:ttft=0,tpot=0", "all weights are 0"),
        ("weights:ttft", "write it as METRIC=NUMBER"),
    ],
)
def test_a_pick_that_is_wrong_is_one_sentence_that_helps(text: str, sentence: str) -> None:
    with pytest.raises(PickError, match="--pick") as raised:
        pick(FRONT, text)

    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_short_name_that_fits_twice_is_not_guessed() -> None:
    shown = study((1.0, 2.0), objectives=(Objective("ttft_p95_s", "s"), Objective("ttft_mean_s", "s")))

    with pytest.raises(PickError, match="ttft_p95_s or ttft_mean_s"):
        pick(shown, "min:ttft")


@pytest.mark.parametrize("text", ["knee", "min:ttft", "slo:ttft<=1", "weights:ttft=1"])
def test_a_study_without_a_complete_trial_says_so(text: str) -> None:
    with pytest.raises(PickError, match="no complete trial yet"):
        pick(study(), text)


def test_a_repeated_measurement_counts_with_the_trial_that_it_repeats() -> None:
    """The lucky first measurement of trial 1 alone would win."""
    lucky, steady = trial(1, ttft_p95_s=0.5, tpot_p95_s=0.1), trial(2, ttft_p95_s=0.8, tpot_p95_s=0.1)
    again = dataclasses.replace(trial(3, ttft_p95_s=1.5, tpot_p95_s=0.1), config=lucky.config, repeats=1)
    shown = view(History(None, (lucky, steady, again), (), ()), OBJECTIVES)

    assert pick(shown, "min:ttft").number == 2
