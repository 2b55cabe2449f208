from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_samples import sample_history

from objectives.measurement import Failure, FailureKind, Stage
from tuner.errors import UsageError
from tuner.ledger import History, TrialRecord, TrialState
from tuner.night import Deadline, Limits, Outlook, candidates, next_step, next_time, outlook
from tuner.pace import MARGIN, StartKind, build_key, saving, starts_of

MEASURED = sample_history(1, running=False).trials[0]
TRIAL_S = 100.0
PACE_S = MARGIN * TRIAL_S
BERLIN = ZoneInfo("Europe/Berlin")


def trial(number: int, *, start_s: float = 20.0, **changes: object) -> TrialRecord:
    assert MEASURED.engine is not None
    effective = {"max_num_seqs": number, "enforce_eager": False}
    engine = dataclasses.replace(MEASURED.engine, start_s=start_s, effective_args=effective)
    base = {"number": number, "engine_s": TRIAL_S, "engine": engine, "source": "sampler" if number else "reference"}
    return dataclasses.replace(MEASURED, **(base | changes))  # type: ignore[arg-type]  # names and types of the record


def again(number: int, repeats: int, **changes: object) -> TrialRecord:
    assert MEASURED.engine is not None
    engine = dataclasses.replace(trial(repeats).engine or MEASURED.engine, start_s=5.0)
    return trial(number, **{"source": "confirm", "repeats": repeats, "engine": engine, "engine_s": 85.0} | changes)  # type: ignore[arg-type]  # as above


def history(*trials: TrialRecord) -> History:
    return History(None, trials, (), ())


def limits(trials: int | None = 10, rounds: int = 0, closing_s: float = 30.0) -> Limits:
    return Limits(trials, rounds, 600.0, closing_s)


# What comes next ----------------------------------------------------------------------------------------------------


def test_without_a_deadline_the_budget_ends_the_search_and_then_the_front_is_confirmed() -> None:
    two = history(trial(0), trial(1))

    assert next_step(two, [1], limits(3, 1), None).kind == "trial"
    step = next_step(two, [1], limits(2, 1), None)
    assert (step.kind, step.repeats) == ("confirm", 1)
    done = next_step(history(*two.trials, again(2, 1)), [1], limits(2, 1), None)
    assert (done.kind, done.code, done.text) == ("stop", "budget", "2 of 2 trials are done")


def test_trial_that_would_not_end_in_time_is_not_begun() -> None:
    one = history(trial(0))

    assert next_step(one, [], limits(), PACE_S + 31).kind == "trial"
    step = next_step(one, [], limits(), PACE_S + 29)
    assert (step.kind, step.code) == ("stop", "deadline")
    assert step.text == "a trial takes about 110 s, 139 s are left, of which 30 s are kept for the end"


def test_last_part_of_the_night_is_kept_for_the_front_and_for_what_joins_it() -> None:
    three = history(trial(0), trial(1), trial(2))
    # A trial; the front of two again; the trial again; who takes their places; report and export.
    needed = PACE_S + 2 * PACE_S + PACE_S + 4 * PACE_S + 30

    assert next_step(three, [1, 2], limits(rounds=1), needed + 1, runners_up=9).kind == "trial"
    assert next_step(three, [1, 2], limits(rounds=1), needed - 4 * PACE_S + 1).kind == "trial"
    step = next_step(three, [1, 2], limits(rounds=1), needed - 1, runners_up=9)
    assert (step.kind, step.repeats) == ("confirm", 1)


def test_rounds_go_round_the_front_and_a_member_that_takes_too_long_gives_way() -> None:
    slow = trial(1, engine_s=400.0)
    three = history(trial(0), slow, trial(2))

    assert next_step(three, [1, 2], limits(3, 2), None).repeats == 1
    assert next_step(history(*three.trials, again(3, 1)), [1, 2], limits(3, 2), None).repeats == 2
    assert next_step(three, [1, 2], limits(3, 2), 200.0).repeats == 2
    assert next_step(three, [1, 2], limits(3, 2), 100.0).kind == "stop"


def test_members_with_the_environment_of_the_running_process_are_confirmed_first() -> None:
    other = dataclasses.replace(MEASURED.config, env={"VLLM_X": "1"})
    three = history(trial(0), trial(1, config=other), trial(2))

    assert next_step(three, [1, 2], limits(3, 1), None).repeats == 2


def test_confirmation_that_failed_counts_and_one_that_was_interrupted_is_done_again() -> None:
    interrupted = Failure(FailureKind.INTERRUPTED, Stage.RUN, "ended")
    failed = Failure(FailureKind.CRASHED, Stage.RUN, "died")
    two = (trial(0), trial(1))

    def after(failure: Failure) -> str:
        record = again(2, 1, state=TrialState.FAILED, failure=failure, engine=None, score=None)
        return next_step(history(*two, record), [1], limits(2, 1), None).kind

    assert (after(failed), after(interrupted)) == ("stop", "confirm")


def test_interrupted_trial_is_run_again_though_the_budget_is_used_up() -> None:
    assert next_step(history(trial(0)), [], limits(1), None, is_open=True).kind == "trial"


def test_night_that_searched_everything_confirms_and_stops() -> None:
    two = history(trial(0), trial(1))

    assert next_step(two, [1], limits(None, 1), None, searched_all=True).kind == "confirm"
    assert next_step(two, [1], limits(None), None, searched_all=True).kind == "stop"


@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=8),
    st.floats(0, 10_000),
    st.integers(0, 3),
    st.integers(1, 12),
)
def test_whatever_is_begun_ends_in_time_as_far_as_is_known(
    seconds: list[float], left_s: float, rounds: int, budget: int
) -> None:
    known = history(*(trial(i, engine_s=s, start_s=0.5) for i, s in enumerate(seconds)))
    front = list(range(len(seconds)))[:3]

    step = next_step(known, front, limits(budget, rounds), left_s)

    if step.kind == "trial":
        assert left_s >= MARGIN * min(seconds) + 30
    if step.kind == "confirm":
        assert step.repeats is not None
        assert left_s >= seconds[step.repeats]


@given(st.floats(0, 5_000), st.integers(0, 2), st.one_of(st.none(), st.integers(1, 40)))
def test_study_that_follows_its_steps_ends_before_its_deadline(left_s: float, rounds: int, budget: int | None) -> None:
    trials = [trial(0)]
    while (step := next_step(history(*trials), [0], limits(budget, rounds), left_s)).kind != "stop":
        number = len(trials)
        trials.append(trial(number) if step.kind == "trial" else again(number, 0))
        left_s -= trials[-1].engine_s

    assert left_s >= 0
    confirmed = sum(t.source == "confirm" for t in trials)
    assert confirmed <= rounds
    if candidates(history(*trials)) > 1:
        assert confirmed == rounds


# When it ends -------------------------------------------------------------------------------------------------------


def test_outlook_names_the_budget_where_it_comes_first() -> None:
    seen = outlook(history(trial(0), trial(1)), [1], limits(5, 1), 10_000.0)

    assert seen == Outlook(
        pytest.approx(3 * PACE_S + PACE_S + 30),
        "the budget: 3 more trials of about 2 min, then the front's 1 members again in 2 min",
    )


def test_outlook_names_the_deadline_where_it_comes_first() -> None:
    seen = outlook(history(trial(0), trial(1)), [], limits(50), 1000.0)

    assert seen.ends_in_s == pytest.approx(8 * PACE_S + 30)
    assert seen.why == "the deadline: 8 more trials of about 2 min fit into 17 min"


def test_outlook_without_limits_promises_nothing() -> None:
    assert outlook(history(), [], limits(None), None).ends_in_s is None


def test_deadline_is_the_earlier_of_hour_and_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)

    assert Deadline(at=1100.0).left_s() == 100.0
    assert Deadline(at=1100.0, monotonic_s=80.0).left_s() == 30.0
    assert Deadline.of(None, None) is None


def test_clock_that_jumps_moves_a_named_hour_and_no_budget_of_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [1000.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    hours, until = Deadline.of(None, 1.0), Deadline(at=5000.0)
    assert hours is not None

    wall[0] += 7200

    assert hours.left_s() == pytest.approx(3600, abs=5)
    assert until.left_s() < 0


# The hour that is named ---------------------------------------------------------------------------------------------


def berlin(year: int, month: int, day: int, hour: int, minute: int = 0, fold: int = 0) -> float:
    return datetime(year, month, day, hour, minute, fold=fold, tzinfo=BERLIN).timestamp()


@pytest.mark.parametrize(
    ("now", "text", "then"),
    [
        ("06:59 today", (berlin(2026, 11, 30, 6, 59), "07:00"), berlin(2026, 11, 30, 7)),
        ("across midnight", (berlin(2026, 11, 30, 22), "07:00"), berlin(2026, 12, 1, 7)),
        ("at that very minute", (berlin(2026, 11, 30, 7), "07:00"), berlin(2026, 12, 1, 7)),
        ("across the hour that is left out", (berlin(2026, 3, 28, 22), "07:00"), berlin(2026, 3, 29, 7)),
        ("across the hour that is repeated", (berlin(2026, 10, 24, 22), "07:00"), berlin(2026, 10, 25, 7)),
        ("in the hour that is left out", (berlin(2026, 3, 28, 22), "02:30"), berlin(2026, 3, 29, 3)),
        ("first of two", (berlin(2026, 10, 24, 22), "02:30"), berlin(2026, 10, 25, 2, 30)),
        ("second of two", (berlin(2026, 10, 25, 2, 45), "02:30"), berlin(2026, 10, 25, 2, 30, 1)),
        ("after both", (berlin(2026, 10, 25, 2, 45, 1), "02:30"), berlin(2026, 10, 26, 2, 30)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hour_is_the_next_one_that_local_clocks_show(now: str, text: tuple[float, str], then: float) -> None:
    assert next_time(text[1], text[0], BERLIN) == then


def test_night_of_the_clock_change_is_an_hour_shorter_and_an_hour_longer() -> None:
    assert next_time("07:00", berlin(2026, 3, 28, 22), BERLIN) - berlin(2026, 3, 28, 22) == 8 * 3600
    assert next_time("07:00", berlin(2026, 10, 24, 22), BERLIN) - berlin(2026, 10, 24, 22) == 10 * 3600


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"])
def test_clock_of_the_machine_is_read_as_the_zone_itself_would(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for hours in range(0, 24 * 366, 7):
            now = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + 3600 * hours
            for text in ("02:30", "07:00"):
                assert next_time(text, now) == next_time(text, now, ZoneInfo(zone)), (zone, now, text)
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.integers(1_700_000_000, 1_900_000_000), st.integers(0, 23), st.integers(0, 59))
def test_hour_is_in_the_future_and_no_more_than_a_day_and_an_hour_away(now: int, hour: int, minute: int) -> None:
    then = next_time(f"{hour:02d}:{minute:02d}", now, BERLIN)

    assert 0 < then - now <= 25 * 3600


@pytest.mark.parametrize("text", ["7", "25:00", "07:60", "morning", ""])
def test_no_time_of_day_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"write it as HH:MM, such as 07:00"):
        next_time(text, 0.0)


# Starts -------------------------------------------------------------------------------------------------------------


def test_starts_are_told_apart_by_what_they_had_to_build() -> None:
    assert MEASURED.engine is not None
    eager = dataclasses.replace(MEASURED.engine, effective_args={"enforce_eager": True})
    all_of_them = history(trial(0), trial(1), again(2, 1), trial(3, engine=eager))

    kinds = [kind for kind, _ in starts_of(all_of_them)]

    assert kinds == [StartKind.COMPILED, StartKind.COMPILED, StartKind.CACHED, StartKind.EAGER]
    assert build_key(all_of_them.trials[1]) == build_key(all_of_them.trials[2])


def test_saving_of_the_compile_cache_is_told_once_both_kinds_were_seen() -> None:
    assert saving(history(trial(0), trial(1))) is None

    saved = saving(history(trial(0), trial(1), again(2, 1), again(3, 0)))

    assert saved is not None
    assert (saved.cached, saved.compiled_s, saved.cached_s, saved.saved_s) == (2, 20.0, 5.0, 30.0)
    assert "30 s saved" in saved.sentence
