from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_samples import sample_history

from tuner.ledger import History, TrialState
from tuner.pace import FIRST_GUESS_S, MARGIN, TWIN_GUESS_S, Pace, first_guess_s

MEASURED = sample_history(1, running=False).trials[0]


def history(*seconds: float) -> History:
    trials = tuple(dataclasses.replace(MEASURED, number=i, engine_s=s) for i, s in enumerate(seconds))
    return History(None, trials, (), ())


def test_before_anything_was_measured_the_guess_holds() -> None:
    assert Pace.of(history()).trial_s == FIRST_GUESS_S
    assert Pace.of(history(), 5.0).trial_s == 5.0


def test_a_twin_is_guessed_to_be_faster() -> None:
    assert first_guess_s("twin") == TWIN_GUESS_S < first_guess_s("vllm") == FIRST_GUESS_S


def test_one_trial_is_taken_with_a_margin() -> None:
    assert Pace.of(history(100.0)).trial_s == pytest.approx(110.0)


def test_slower_half_decides() -> None:
    assert Pace.of(history(10, 20, 30, 40, 50)).trial_s == pytest.approx(44.0)


def test_trials_that_no_engine_ran_to_its_end_say_nothing() -> None:
    refused = dataclasses.replace(MEASURED, engine_s=0.0, engine=None, state=TrialState.INFEASIBLE)
    out_of_memory = dataclasses.replace(MEASURED, engine_s=900.0, engine=None, state=TrialState.INFEASIBLE)
    running = dataclasses.replace(MEASURED, engine_s=0.0, state=TrialState.RUNNING)

    assert Pace.of(History(None, (refused, out_of_memory, running), (), ())).trial_s == FIRST_GUESS_S


@given(st.lists(st.floats(1.0, 1e5), min_size=1, max_size=30))
def test_pace_lies_between_the_fastest_and_the_slowest_trial(seconds: list[float]) -> None:
    pace = Pace.of(history(*seconds)).trial_s / MARGIN

    assert min(seconds) * 0.999 <= pace <= max(seconds) * 1.001
