from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tuner.chooser import Chooser, Foresight
from tuner.search.coordinates import Coordinates
from tuner.search.suggest import Past
from tuner.space import Parameter
from tuner.spec import Search

SPACE = {
    "max_num_seqs": Parameter(low=1, high=512, log=True),
    "max_num_batched_tokens": Parameter(low=256, high=16384, log=True),
    "block_size": Parameter(choices=(16, 32, 64, 128)),
    "async_scheduling": Parameter(choices=(True, False)),
}
COORDINATES = Coordinates(SPACE)


def times(c: Mapping[str, Any]) -> tuple[float, float]:
    """Made-up TTFT and TPOT; block_size and async_scheduling matter too."""
    ttft = 2000 / c["max_num_batched_tokens"] + 30 / c["max_num_seqs"] + c["block_size"] / 200
    return ttft, (0.01 + c["max_num_seqs"] / 5000) * (1.0 if c["async_scheduling"] else 1.2)


def twin(configurations: Sequence[Mapping[str, Any]], _: int) -> list[Sequence[float] | None]:
    return [[1.4 * t for t in times(c)] for c in configurations]


def contrary(configurations: Sequence[Mapping[str, Any]], _: int) -> list[Sequence[float] | None]:
    """What it calls fast is slow, by far."""
    return [[t**-3 for t in times(c)] for c in configurations]


def chooser(notes: list[str], foresight: Foresight | None = None, **search: Any) -> Chooser:
    return Chooser(
        SPACE,
        Search(**{"startup_trials": 3, **search}),
        objectives=2,
        model=lambda values: [math.log(v) for v in values],
        admits=lambda c: c["max_num_batched_tokens"] / 8192 - 1,
        foresight=foresight,
        noted=notes.append,
    )


def past_of(tried: Sequence[Mapping[str, Any]]) -> Past:
    count, empty = len(tried), np.empty((0, len(SPACE)))
    return Past(
        positions=np.array([COORDINATES.position(c) for c in tried]).reshape(count, len(SPACE)),
        values=np.log(np.array([times(c) for c in tried])).reshape(count, 2),
        violations=np.full((count, 1), -0.5),
        widths=np.full((count, 2), np.nan),
        ratios=np.full(2, 0.15),
        pending=empty,
        closed=empty,
        censored=empty,
        bounds=np.empty((0, 2)),
    )


def play(plays: Chooser, trials: int, design: int = 3) -> list[Mapping[str, Any]]:
    tried: list[Mapping[str, Any]] = []
    for number in range(trials):
        choice = plays.choose(past_of(tried), number, followed=True)
        assert choice is not None
        assert choice.source == ("design" if number < design else "sampler")
        tried.append(choice.changes)
    return tried


def test_design_and_model_keep_to_what_is_admitted_and_repeat_nothing() -> None:
    tried = play(chooser([]), 10)

    assert all(c["max_num_batched_tokens"] <= 8192 for c in tried)
    assert len({str(sorted(c.items())) for c in tried}) == 10


def test_other_samplers_get_their_say_after_the_design() -> None:
    assert chooser([], sampler="tpe").choose(past_of(play(chooser([]), 3)), 0, followed=True) is None


def test_right_twin_finds_good_trials_at_once() -> None:
    guided = play(chooser([], Foresight(twin)), 6, design=1)[1:]
    alone = play(chooser([]), 8)[3:]

    assert sum(c["async_scheduling"] and c["block_size"] == 16 for c in guided) >= 4
    assert sum(c["async_scheduling"] and c["block_size"] == 16 for c in guided) >= sum(
        c["async_scheduling"] and c["block_size"] == 16 for c in alone
    )


def test_twin_that_misleads_is_not_followed_and_that_is_said_once() -> None:
    notes: list[str] = []
    misled = chooser(notes, Foresight(contrary))
    past = past_of(play(chooser([]), 10))

    first = misled.choose(past, 0, followed=True)
    assert first is not None
    second = misled.choose(past, 1, followed=bool(first.attributes["follows_twin"]))

    assert second is not None
    assert first.attributes["follows_twin"] is second.attributes["follows_twin"] is False
    assert len(notes) == 1
    assert "not followed" in notes[0]


def test_one_trial_that_the_twin_gets_wrong_by_far_does_not_turn_the_search_away_from_it() -> None:
    past = past_of(play(chooser([]), 6))
    values = past.values.copy()
    values[2] += 1.5

    choice = chooser([], Foresight(twin)).choose(replace(past, values=values), 0, followed=True)

    assert choice is not None
    assert choice.attributes["follows_twin"] is True


def test_twin_that_became_right_is_followed_again_and_that_is_said() -> None:
    notes: list[str] = []

    choice = chooser(notes, Foresight(twin)).choose(past_of(play(chooser([]), 10)), 0, followed=False)

    assert choice is not None
    assert choice.attributes["follows_twin"] is True
    assert "followed again" in notes[0]


def promised(*gains: float, noise: float = 0.0) -> list[tuple[float, float]]:
    return [(gain, noise) for gain in gains]


def test_search_ends_when_three_choices_in_a_row_promise_too_little() -> None:
    stops, never = chooser([], stop_when_gain_below=0.002), chooser([])

    end = stops.end(promised(0.2, 0.001, 0.0015, 0.001))

    assert end is not None
    assert end.code == "converged"
    assert "0.20%" in end.text
    assert stops.end(promised(0.2, 0.001, 0.001)) is None
    assert stops.end(promised(0.001, 0.001)) is None
    assert never.end(promised(0.2, 0.001, 0.0015, 0.001)) is None


def test_search_ends_when_three_choices_in_a_row_promise_less_than_noise_alone_does() -> None:
    stops = chooser([], stop_when_gain_below="noise")

    end = stops.end(promised(0.2, 0.001, 0.0015, 0.001, noise=0.01))

    assert end is not None
    assert "1.00%" in end.text
    assert stops.end(promised(0.001, 0.02, 0.001, noise=0.01)) is None
    assert stops.end(promised(0.001, 0.001, 0.001)) is None


def test_search_with_many_trials_under_way_waits_for_as_many_that_promise_too_little() -> None:
    stops = chooser([], stop_when_gain_below=0.002)

    assert stops.end(promised(*[0.001] * 7), under_way=8) is None
    assert stops.end(promised(*[0.001] * 8), under_way=8) is not None


def test_search_ends_when_nothing_is_found_that_may_be_tried() -> None:
    refusing = Chooser(
        SPACE, Search(), objectives=2, model=list, admits=lambda _: 1.0, foresight=None, noted=lambda _: None
    )
    for _ in range(3):
        assert refusing.end([]) is None
        assert refusing.choose(past_of([]), 0, followed=True) is None

    end = refusing.end([])
    assert end is not None
    assert end.code == "exhausted"
