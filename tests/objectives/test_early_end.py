from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.early_end import MARGIN, RunningBounds, bar, beaten_by, can_bound
from objectives.intervals import percentile
from objectives.latency import tpot_s, ttft_s
from objectives.measurement import RequestRecord

METRICS = ("ttft_p95_s", "tpot_p50_s", "e2el_max_s")
times = st.floats(0.001, 100.0)
runs = st.lists(st.tuples(times, times), min_size=1, max_size=40)


def over(index: int, ttft: float, decode: float) -> RequestRecord:
    return RequestRecord(
        f"r{index}", 8, 5, float(index), float(index), first_token_s=index + ttft, last_token_s=index + ttft + decode,
        finish_reason="length",
    )  # fmt: skip


def records(run: list[tuple[float, float]]) -> list[RequestRecord]:
    return [over(i, *one) for i, one in enumerate(run)]


@given(runs, st.integers(0, 40))
def test_bound_holds_whatever_the_other_requests_do(run: list[tuple[float, float]], seen: int) -> None:
    whole = records(run)
    bounds = RunningBounds(METRICS, len(whole))
    for record in whole[:seen]:
        bounds.add(record)

    at_least = bounds.at_least()

    ttfts, tpots = [ttft_s(r) or 0.0 for r in whole], [tpot_s(r) or 0.0 for r in whole]
    assert at_least["ttft_p95_s"] <= percentile(ttfts, 95) * (1 + 1e-9)
    assert at_least["tpot_p50_s"] <= percentile(tpots, 50) * (1 + 1e-9)


@given(runs)
def test_bound_of_a_whole_run_is_its_metric(run: list[tuple[float, float]]) -> None:
    whole = records(run)
    bounds = RunningBounds(METRICS, len(whole))
    for record in whole:
        bounds.add(record)

    assert bounds.at_least()["ttft_p95_s"] == pytest.approx(percentile([ttft_s(r) or 0.0 for r in whole], 95))


@given(runs, st.integers(1, 20))
def test_bound_holds_where_requests_get_lost_later(run: list[tuple[float, float]], lost: int) -> None:
    whole = records(run)
    bounds = RunningBounds(METRICS, len(whole) + lost)
    for record in whole:
        bounds.add(record)

    assert bounds.at_least()["ttft_p95_s"] <= percentile([ttft_s(r) or 0.0 for r in whole], 95) * (1 + 1e-9)


def test_request_that_was_not_served_says_nothing() -> None:
    bounds = RunningBounds(METRICS, 1)

    bounds.add(RequestRecord("r", 8, 1, 0.0, 0.0, first_token_s=90.0, last_token_s=99.0, error="the engine died"))

    assert set(bounds.at_least().values()) == {0.0}


def test_run_is_beaten_only_where_it_is_worse_in_everything_by_the_margin() -> None:
    front = [bar(3, {"ttft_p95_s": 10.0, "tpot_p95_s": 0.1}, {}), bar(5, {"ttft_p95_s": 20.0, "tpot_p95_s": 0.05}, {})]

    assert beaten_by(front, {"ttft_p95_s": 13.0, "tpot_p95_s": 0.13}) is front[0]
    assert beaten_by(front, {"ttft_p95_s": 11.9, "tpot_p95_s": 0.13}) is None
    assert beaten_by(front, {"ttft_p95_s": 40.0, "tpot_p95_s": 0.07}) is front[1]
    assert beaten_by(front, {"ttft_p95_s": 40.0}) is None
    assert beaten_by([], {"ttft_p95_s": 40.0, "tpot_p95_s": 1.0}) is None


def test_margin_is_twice_the_noise_where_that_is_more() -> None:
    made = bar(1, {"ttft_p95_s": 10.0, "tpot_p95_s": 0.1}, {"ttft_p95_s": 0.3})

    assert made.limits == pytest.approx({"ttft_p95_s": 16.0, "tpot_p95_s": 0.1 * (1 + MARGIN)})


@pytest.mark.parametrize(
    ("metric", "can"),
    [
        ("ttft_p95_s", True),
        ("tpot_max_s", True),
        ("e2el_p50_s", True),
        ("ttft_mean_s", False),
        ("ttft_p95_s_corrected", False),
        ("ttft_p95_s@2048", False),
        ("output_tokens_per_s", False),
        ("module:function", False),
    ],
)
def test_only_what_can_be_bounded_is(metric: str, can: bool) -> None:
    assert can_bound(metric) is can
