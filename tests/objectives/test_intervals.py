from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from objectives.intervals import Bootstrap, percentile, requests_needed

values = st.lists(st.floats(min_value=-1e6, max_value=1e6, allow_nan=False), min_size=2, max_size=40)
PERCENTS = (50.0, 90.0, 95.0, 99.0)


def one_repeat(n: int) -> Bootstrap:
    return Bootstrap(np.zeros(n, dtype=np.int64))


@given(values, st.sampled_from(PERCENTS))
def test_percentile_is_numpys_linear_one_and_lies_within_the_sample(sample: list[float], percent: float) -> None:
    value = percentile(sample, percent)
    assert value == np.percentile(sample, percent, method="linear")
    assert min(sample) <= value <= max(sample)


@pytest.mark.parametrize(("percent", "needed"), [(50.0, 2), (90.0, 10), (95.0, 20), (99.0, 100)])
def test_a_percentile_needs_one_request_beyond_it(percent: float, needed: int) -> None:
    assert requests_needed(percent) == needed


@settings(max_examples=40, deadline=None)
@given(values)
def test_an_interval_holds_its_estimate_and_lies_within_the_sample(sample: list[float]) -> None:
    column = np.array(sample)
    bootstrap = one_repeat(column.size)
    slack = 1e-9 * max(1.0, np.abs(column).max())
    intervals = [bootstrap.mean(column), *bootstrap.percentiles(column, PERCENTS)]
    estimates = [column.mean(), *(percentile(column, p) for p in PERCENTS)]
    for (low, high), estimate in zip(intervals, estimates, strict=True):
        assert low <= estimate <= high
        assert column.min() - slack <= low
        assert high <= column.max() + slack


def test_drawn_percentiles_are_those_of_numpy_on_the_drawn_sample() -> None:
    rng = np.random.default_rng(1)
    column = rng.lognormal(size=37)
    bootstrap = Bootstrap(np.repeat([0, 1], [20, 17]))
    drawn = np.array([np.percentile(np.repeat(column, counts), PERCENTS) for counts in bootstrap._counts])
    expected = np.percentile(drawn, [2.5, 97.5], axis=0).T
    assert np.allclose(bootstrap.percentiles(column, PERCENTS), expected)


@pytest.mark.parametrize(("statistic", "index"), [(np.mean, None), (np.median, 0), (lambda x: np.percentile(x, 90), 1)])
def test_intervals_agree_with_scipys_percentile_bootstrap(statistic: Any, index: int | None) -> None:
    column = np.random.default_rng(2).lognormal(sigma=0.5, size=150)
    bootstrap = one_repeat(column.size)
    mine = bootstrap.mean(column) if index is None else bootstrap.percentiles(column, (50.0, 90.0))[index]
    theirs = stats.bootstrap(
        (column,), statistic, vectorized=False, method="percentile", n_resamples=2000, rng=np.random.default_rng(3)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert mine[0] == pytest.approx(theirs.low, abs=0.15 * width)
    assert mine[1] == pytest.approx(theirs.high, abs=0.15 * width)


def test_a_95_percent_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(4)
    bootstrap = one_repeat(100)
    truths = np.array([1.0, np.log(2.0), np.log(10.0)])
    hits = np.zeros(3)
    for _ in range(200):
        column = rng.exponential(size=100)
        ends = np.array([bootstrap.mean(column), *bootstrap.percentiles(column, (50.0, 90.0))])
        hits += (ends[:, 0] <= truths) & (truths <= ends[:, 1])
    assert ((hits / 200 > 0.89) & (hits / 200 < 0.99)).all()


def test_an_interval_over_repeats_covers_the_difference_between_them() -> None:
    rng = np.random.default_rng(5)
    within = rng.normal(size=100)
    column = np.concatenate([within + shift for shift in (0.0, 5.0, 10.0, 15.0)])
    repeats = np.repeat(np.arange(4), 100)
    low, high = Bootstrap(repeats).mean(column)
    pooled = one_repeat(400).mean(column)
    assert high - low > 5 * (pooled[1] - pooled[0])
    assert low < 4.0
    assert high > 11.0


def test_repeats_cover_the_true_mean_far_more_often_than_pooled_requests_do() -> None:
    rng = np.random.default_rng(6)
    repeats = np.repeat(np.arange(6), 20)
    by_repeat, pooled = Bootstrap(repeats), one_repeat(120)
    hits = np.zeros(2)
    for _ in range(200):
        column = np.repeat(rng.normal(size=6), 20) + rng.normal(size=120)
        ends = np.array([by_repeat.mean(column), pooled.mean(column)])
        hits += (ends[:, 0] <= 0.0) & (ends[:, 1] >= 0.0)
    assert hits[0] / 200 > 0.82
    assert hits[1] / 200 < 0.70


def test_the_same_data_give_the_same_interval() -> None:
    column = np.random.default_rng(7).lognormal(size=60)
    assert one_repeat(60).percentiles(column, PERCENTS) == one_repeat(60).percentiles(column, PERCENTS)


def gaps_of(requests: int, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scale = rng.lognormal(sigma=0.3, size=(requests, 1))
    return (scale * rng.exponential(0.05, (requests, tokens))).ravel(), np.repeat(np.arange(requests), tokens)


def test_gap_intervals_draw_whole_requests_with_their_gaps() -> None:
    gaps, owners = gaps_of(50, 40, seed=8)
    bootstrap = one_repeat(50)
    drawn = np.array([np.percentile(np.repeat(gaps, counts[owners]), PERCENTS) for counts in bootstrap._counts])
    exact = np.percentile(drawn, [2.5, 97.5], axis=0).T
    assert np.allclose(bootstrap.gap_percentiles(gaps, owners, PERCENTS), exact, rtol=1e-9)


def test_binned_gaps_are_off_by_a_few_percent_of_the_width_at_most() -> None:
    gaps, owners = gaps_of(120, 100, seed=9)
    bootstrap = one_repeat(120)
    drawn = np.array([np.percentile(np.repeat(gaps, counts[owners]), PERCENTS) for counts in bootstrap._counts[:400]])
    exact = np.percentile(drawn, [2.5, 97.5], axis=0).T
    binned = np.array(bootstrap.gap_percentiles(gaps, owners, PERCENTS))
    width = (exact[:, 1] - exact[:, 0])[:, None]
    assert (np.abs(binned - exact) < 0.25 * width).all()


def test_gap_moments_are_the_mean_and_deviation_over_all_drawn_gaps() -> None:
    gaps, owners = gaps_of(30, 20, seed=10)
    bootstrap = one_repeat(30)
    samples = [np.repeat(gaps, counts[owners]) for counts in bootstrap._counts]
    mean, spread = bootstrap.gap_moments(gaps, owners)
    assert mean == pytest.approx(np.percentile([s.mean() for s in samples], [2.5, 97.5]))
    assert spread == pytest.approx(np.percentile([s.std() for s in samples], [2.5, 97.5]))


def test_requests_without_gaps_may_be_drawn_alone() -> None:
    gaps, owners = np.array([0.1, 0.2]), np.array([0, 1])
    bootstrap = one_repeat(6)
    (interval,) = bootstrap.gap_percentiles(gaps, owners, (50.0,))
    assert interval == pytest.approx((0.1, 0.2))
    assert bootstrap.gap_moments(gaps, owners)[0] == pytest.approx((0.1, 0.2))


def test_a_rate_over_repeats_weighs_their_lengths() -> None:
    repeats = np.repeat([0, 1, 2], 10)
    low, high = Bootstrap(repeats).rate(np.ones(30), np.array([5.0, 10.0, 20.0]))
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(2.0)


def test_no_request_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        one_repeat(0)
