from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tuner.design import design_points
from tuner.search.candidates import near_points, spread_points
from tuner.search.coordinates import Coordinates, keys
from tuner.search.suggest import Past, _unforeseen, suggest
from tuner.search.surrogate import Observed, learned
from tuner.space import Parameter

SPACE = {
    "seqs": Parameter(low=1, high=512, log=True),
    "tokens": Parameter(low=256, high=16384, log=True),
    "cache": Parameter(choices=(True, False)),
    "block": Parameter(choices=(16, 32, 64, 128)),
    "backend": Parameter(choices=("a", "b", "c")),
}
COORDINATES = Coordinates(SPACE)
ROOM = 2_000_000


def runs(changes: Mapping[str, Any]) -> bool:
    return bool(changes["seqs"] * changes["tokens"] <= ROOM)


def times(changes: Mapping[str, Any]) -> list[float]:
    """Logarithms of a made-up TTFT and TPOT; backend b is the best in both."""
    other = 0.0 if changes["backend"] == "b" else 0.3
    ttft = np.log(2000 / changes["tokens"] + 60 / changes["seqs"]) + other
    return [float(ttft), float(np.log(1 + changes["tokens"] / 8000 + changes["seqs"] / 200)) + other]


def past_of(tried: list[dict[str, Any]], pending: list[dict[str, Any]] | None = None) -> Past:
    size = COORDINATES.size
    return Past(
        positions=np.array([COORDINATES.position(c) for c in tried]),
        values=np.array([times(c) if runs(c) else [np.nan, np.nan] for c in tried]),
        violations=np.array([[c["seqs"] * c["tokens"] / ROOM - 1] for c in tried]),
        widths=np.full((len(tried), 2), np.nan),
        ratios=np.full(2, 0.15),
        pending=np.array([COORDINATES.position(c) for c in pending or []]).reshape(-1, size),
        closed=np.empty((0, size)),
        censored=np.empty((0, size)),
        bounds=np.empty((0, 2)),
    )


def everything_is_admitted(_: Mapping[str, Any]) -> float:
    return -1.0


TRIED = design_points(SPACE, 12, 0)


def test_suggestion_is_in_the_space_and_not_known() -> None:
    found = suggest(past_of(TRIED), COORDINATES, 1, everything_is_admitted)

    assert found is not None
    assert all(SPACE[name].contains(value) for name, value in found.changes.items())
    assert found.changes not in TRIED
    assert found.gain > 0


def test_same_past_and_seed_give_the_same_suggestion() -> None:
    first = suggest(past_of(TRIED), COORDINATES, 1, everything_is_admitted)

    assert suggest(past_of(TRIED), COORDINATES, 1, everything_is_admitted) == first
    assert suggest(past_of(TRIED), COORDINATES, 2, everything_is_admitted) != first


def test_what_is_not_admitted_is_never_suggested() -> None:
    found = suggest(past_of(TRIED), COORDINATES, 1, lambda c: 1.0 if c["cache"] else -1.0)

    assert found is not None
    assert found.changes["cache"] is False


def test_nothing_is_suggested_where_everything_is_refused_or_nothing_was_measured() -> None:
    assert suggest(past_of(TRIED), COORDINATES, 1, lambda _: 1.0) is None

    failed = [c for c in design_points(SPACE, 64, 0) if not runs(c)]
    assert suggest(past_of(failed), COORDINATES, 1, everything_is_admitted) is None


def test_only_a_failure_that_was_not_expected_teaches_the_model_where_nothing_runs() -> None:
    past = past_of(TRIED)
    past.violations[3:5] = 0.4

    learned = _unforeseen(past, COORDINATES, lambda c: 0.4 if c == TRIED[3] else -0.1)

    assert np.isnan(learned[3, 0])
    assert learned[4, 0] == 0.4
    assert np.array_equal(learned[:3], past.violations[:3])


def test_small_space_is_tried_to_its_end_and_then_nothing_is_left() -> None:
    space = {"a": Parameter(choices=(1, 2, 3)), "b": Parameter(choices=(True, False))}
    coordinates = Coordinates(space)
    tried = design_points(space, 1, 0)
    while True:
        positions = np.array([coordinates.position(c) for c in tried])
        values = np.array([[float(c["a"]), 4.0 - c["a"] + c["b"]] for c in tried])
        empty, nothing = np.empty((0, 2)), np.full((len(tried), 1), -1.0)
        past = Past(
            positions,
            values,
            nothing,
            np.full((len(tried), 2), np.nan),
            np.full(2, 0.15),
            empty,
            empty,
            empty,
            np.empty((0, 2)),
        )
        found = suggest(past, coordinates, len(tried), everything_is_admitted)
        if found is None:
            break
        tried.append(dict(found.changes))

    assert len(set(keys(positions))) == len(tried) == 6


def test_pending_trial_is_neither_repeated_nor_approached() -> None:
    first = suggest(past_of(TRIED), COORDINATES, 1, everything_is_admitted)
    assert first is not None

    second = suggest(past_of(TRIED, [dict(first.changes)]), COORDINATES, 1, everything_is_admitted)

    assert second is not None
    apart = np.abs(COORDINATES.position(first.changes) - COORDINATES.position(second.changes))
    assert apart.max() > 0.05


def test_few_suggestions_learn_what_is_best_and_what_does_not_run() -> None:
    tried = design_points(SPACE, 6, 3)
    for index in range(14):
        found = suggest(past_of(tried), COORDINATES, index, everything_is_admitted)
        assert found is not None
        tried.append(dict(found.changes))

    latest = tried[-8:]
    assert sum(c["backend"] == "b" for c in latest) >= 5
    assert sum(runs(c) for c in latest) >= 5


def test_spread_points_are_different_and_lie_on_values() -> None:
    points = spread_points(COORDINATES, 0)

    assert np.allclose(COORDINATES.snapped(points), points)
    assert len(set(keys(points))) > 0.9 * len(points)


def test_small_space_is_listed_and_a_part_of_it_is_spread() -> None:
    small = Coordinates({"seqs": Parameter(low=1, high=20), "block": Parameter(choices=(16, 32, 64, 128))})

    assert len(spread_points(small, 0, 16, all_up_to=80)) == 80
    part = spread_points(small, 0, 16)
    assert len(part) == 16
    assert len(set(part[:, 1].tolist())) == 4


def test_near_points_differ_from_a_centre_in_one_to_three_parameters() -> None:
    centre = np.array([COORDINATES.position(TRIED[0])])

    points = near_points(COORDINATES, centre, np.random.default_rng(0), 200)

    moved = (~np.isclose(points, centre)).sum(axis=1)
    assert moved.max() <= 3
    assert np.mean(moved >= 1) > 0.9


def test_trial_that_was_ended_early_is_not_proposed_again_and_keeps_others_from_its_neighbourhood() -> None:
    past = past_of(TRIED)
    first = suggest(past, COORDINATES, 1, everything_is_admitted)
    assert first is not None
    position = COORDINATES.position(first.changes)

    ended = replace(past, censored=position[None, :], bounds=np.array([[9.0, 9.0]]))
    second = suggest(ended, COORDINATES, 1, everything_is_admitted)

    assert second is not None
    assert np.abs(COORDINATES.position(second.changes) - position).max() > 0.05


def test_bound_changes_what_is_believed_only_where_more_was_not_expected() -> None:
    past = past_of([c for c in TRIED if runs(c)])
    features = COORDINATES.features(past.positions)
    believed = learned(Observed(features, past.values, past.violations, past.widths, past.ratios))
    place = COORDINATES.features(COORDINATES.position(design_points(SPACE, 20, 3)[-1])[None, :])
    expected, _ = believed.predict(place)

    same, _ = believed.bounded(place, expected - 1.0).predict(place)
    worse, _ = believed.bounded(place, expected + 1.0).predict(place)

    assert np.allclose(same, expected, atol=1e-6)
    assert (worse > expected + 0.5).all()


def test_gain_with_one_objective_is_a_share_of_what_the_best_is_ahead_of_the_others() -> None:
    past = past_of(TRIED)
    values = past.values[:, :1]
    one = replace(past, values=values, widths=past.widths[:, :1], ratios=past.ratios[:1], bounds=past.bounds[:, :1])

    found = suggest(one, COORDINATES, 1, everything_is_admitted)

    assert found is not None
    assert 0 < found.gain < 2


def test_noise_of_the_front_is_that_of_its_measurements() -> None:
    past = past_of([c for c in design_points(SPACE, 40, 1) if runs(c)])
    draws = np.random.default_rng(0).normal(0.0, 0.3, past.values.shape)

    exact = suggest(past, COORDINATES, 1, everything_is_admitted)
    noisy = suggest(replace(past, values=past.values + draws), COORDINATES, 1, everything_is_admitted)

    assert exact is not None
    assert noisy is not None
    assert 0 < 3 * exact.noise < noisy.noise < 1
