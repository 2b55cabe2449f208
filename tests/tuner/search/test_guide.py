from __future__ import annotations

import math

import numpy as np

from tuner.search.coordinates import Array, Coordinates
from tuner.search.guide import THOROUGH, explored, guided
from tuner.search.suggest import Past, _aim, suggest
from tuner.search.surrogate import Observed, learned
from tuner.space import Parameter

SPACE = {
    "seqs": Parameter(low=1, high=512, log=True),
    "tokens": Parameter(low=256, high=16384, log=True),
    "backend": Parameter(choices=("a", "b", "c")),
}
COORDINATES = Coordinates(SPACE)
PLACES = COORDINATES.snapped(np.random.default_rng(0).random((12, 3)))


def times(positions: Array) -> Array:
    """Logarithms of two times, with a step that no smooth process follows: nothing runs beyond it, c is not known."""
    seqs, tokens, backend = positions.T
    ttft = 3 - 2 * tokens - seqs + np.where(tokens > 0.6, 1.0, 0.0)
    values = np.column_stack([ttft, -3 + tokens + seqs])
    values[seqs > 0.8] = np.inf
    values[backend > 0.7] = np.nan
    return values


class Predictor:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Array] = []

    def __call__(self, positions: Array) -> Array:
        self.asked.append(positions)
        return times(positions)


def test_predictions_that_were_made_are_exact_and_the_others_are_not_certain() -> None:
    positions, values = explored(COORDINATES, times, 0, THOROUGH)
    guide = guided(COORDINATES, positions, values, times, THOROUGH)
    assert guide is not None
    finite = np.isfinite(values).all(axis=1)

    predicted, deviations = guide.predict(COORDINATES.features(positions[finite]))
    between = COORDINATES.snapped(np.random.default_rng(1).random((20, 3)))

    assert np.array_equal(predicted, values[finite])
    assert not deviations.any()
    assert (guide.predict(COORDINATES.features(between))[1] > 0).all()


def test_guide_tells_what_would_not_run_from_what_is_not_known() -> None:
    guide = guided(COORDINATES, *explored(COORDINATES, times, 0, THOROUGH), times, THOROUGH)
    assert guide is not None
    will_not, unknown, fine = COORDINATES.snapped(np.array([[0.9, 0.5, 0.1], [0.5, 0.5, 0.9], [0.5, 0.5, 0.1]]))[
        :, None
    ]

    guide = guide.asking(np.vstack([will_not, unknown, fine]))

    answers = [
        (guide.refuses(f)[0], guide.was_asked(f)[0]) for f in map(COORDINATES.features, (will_not, unknown, fine))
    ]
    assert answers == [(True, True), (False, True), (False, True)]


def test_what_is_suggested_was_predicted_and_runs() -> None:
    predictor = Predictor()
    guide = guided(COORDINATES, *explored(COORDINATES, times, 0, THOROUGH), predictor, THOROUGH)
    assert guide is not None
    tried = PLACES[np.isfinite(times(PLACES)).all(axis=1)][:5]
    past = Past(
        positions=tried,
        values=times(tried) + 0.1,
        violations=np.full((len(tried), 1), -0.5),
        widths=np.full((len(tried), 2), np.nan),
        ratios=np.full(2, 0.15),
        pending=np.empty((0, 3)),
        closed=np.empty((0, 3)),
        censored=np.empty((0, 3)),
        bounds=np.empty((0, 2)),
    )

    found = suggest(past, COORDINATES, 0, lambda _: 0.0, guide)

    assert found is not None
    assert found.follows_guide
    features = COORDINATES.features(COORDINATES.position(found.changes)[None, :])
    for positions in tuple(predictor.asked):
        guide = guide.asking(positions)
    assert guide.was_asked(features).all()
    assert not guide.refuses(features).any()


def test_corner_hangs_on_nothing_that_was_only_filled_in() -> None:
    positions, values = explored(COORDINATES, times, 0, THOROUGH)
    guide = guided(COORDINATES, positions, values, times, THOROUGH)
    assert guide is not None
    runs = positions[np.isfinite(values).all(axis=1)]
    tried = COORDINATES.features(runs[:5])
    observed = Observed(tried, times(runs[:5]), np.full((5, 1), -0.5), np.full((5, 2), np.nan), np.full(2, 0.15))
    surrogate = learned(observed, guide)
    assert surrogate.followed is not None
    asked, nothing = COORDINATES.features(runs), np.empty((0, tried.shape[1]))
    elsewhere = COORDINATES.features(COORDINATES.snapped(np.random.default_rng(1).random((200, 3))))

    aim = _aim(observed, surrogate, nothing, asked)

    assert np.array_equal(_aim(observed, surrogate, nothing, np.vstack([asked, elsewhere])).corner, aim.corner)


def test_what_is_scheduled_as_a_tried_configuration_is_not_worth_a_trial_of_its_own() -> None:
    space = {
        "max_num_seqs": Parameter(choices=(1, 2, 4, 8, 16, 32)),
        "max_num_batched_tokens": Parameter(choices=(64, 128, 256, 512)),
        "block_size": Parameter(choices=(16, 32)),
    }
    coordinates = Coordinates(space)

    def scheduled(positions: Array) -> Array:
        """Never more than four requests are there; sums lose the last digits."""
        found = [coordinates.changes(row) for row in positions]
        seqs = np.log(np.minimum([c["max_num_seqs"] for c in found], 4))
        tokens = np.log([c["max_num_batched_tokens"] for c in found])
        lost = 1e-15 * np.array([c["max_num_seqs"] for c in found])
        return np.column_stack([2 - tokens - seqs + lost, tokens + seqs - 2])

    def features(seqs: int, tokens: int, block: int) -> Array:
        changes = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "block_size": block}
        return coordinates.features(coordinates.position(changes)[None, :])

    guide = guided(coordinates, *explored(coordinates, scheduled, 0, THOROUGH), scheduled, THOROUGH)
    assert guide is not None
    looked_at = np.vstack([features(32, 64, 16), features(32, 64, 32), features(2, 64, 16), features(8, 128, 16)])

    assert guide.repeats(looked_at, features(8, 64, 16)).tolist() == [True, False, False, False]
    assert not guide.repeats(looked_at, np.empty((0, 3))).any()


def test_columns_of_a_category_are_all_of_its_values() -> None:
    assert COORDINATES.columns_of({"tokens", "backend"}).tolist() == [False, True, True, True, True]


def test_one_trial_that_the_predictor_gets_wrong_by_far_does_not_make_it_useless() -> None:
    space = {
        "max_num_seqs": Parameter(choices=(1, 2, 4, 8, 16, 32, 64, 128)),
        "max_num_batched_tokens": Parameter(low=64, high=4096, log=True),
        "kv_cache_memory_bytes": Parameter(choices=tuple(mib << 20 for mib in (96, 128, 192, 256, 512, 1024))),
    }
    coordinates = Coordinates(space)

    def expected(positions: Array) -> Array:
        found = [coordinates.changes(p) for p in positions]
        queued = {1: 16.2, 2: 12.1}
        ttft = [
            queued.get(c["max_num_seqs"], 9.3 + 0.24 * math.log2(4096 / c["max_num_batched_tokens"])) for c in found
        ]
        return np.log(np.column_stack([ttft, [0.03 * c["max_num_seqs"] for c in found]]))

    guide = guided(coordinates, *explored(coordinates, expected, 0, THOROUGH), expected, THOROUGH)
    assert guide is not None
    # Four trials of a real study: of the second, with its short pieces, the predictor is wrong by half.
    tried = [(8, 3528, 1024, 10.07), (8, 64, 256, 16.77), (2, 2726, 512, 12.37), (1, 1644, 256, 17.83)]
    places = np.array(
        [coordinates.position(dict(zip(space, (seqs, chunk, mib << 20), strict=True))) for seqs, chunk, mib, _ in tried]
    )
    values = np.column_stack([np.log([row[-1] for row in tried]), expected(places)[:, 1]])
    observed = Observed(
        coordinates.features(places), values, np.full((4, 1), -0.5), np.full((4, 2), np.nan), np.full(2, 0.15)
    )

    assert learned(observed, guide).follows == (True, True)
