import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurement_samples import measurement, record, step

from objectives.measurement import Measurement, RequestRecord
from objectives.metrics import METRICS, UnknownMetricError, compute_all, lookup, names

SLO = {"ttft_s": 2.0, "tpot_s": 0.2}
OUTSIDE = {"speed_index"}


def large(requests: int, tokens: int) -> Measurement:
    rng = np.random.default_rng(0)
    first = np.arange(requests) * 0.1 + rng.exponential(1.0, requests)
    gaps = rng.exponential(0.05, (requests, tokens - 1)).cumsum(axis=1)
    arrivals = np.concatenate([first[:, None], first[:, None] + gaps], axis=1).tolist()
    records = tuple(
        record(i, scheduled_s=0.1 * i, prompt_tokens=512 * (1 + i % 4), output_tokens=tokens, token_times_s=tuple(t))
        for i, t in enumerate(arrivals)
    )
    return measurement(requests=records, duration_s=(100.0,))


def test_every_metric_of_the_registry_is_computed_and_every_computed_one_is_registered() -> None:
    values = compute_all(measurement(), SLO).values
    assert {lookup(name).name for name in values} == set(values)
    assert {name for name in values if "@" not in name} == set(METRICS) - OUTSIDE


def test_every_metric_has_unit_direction_and_description() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.direction in ("minimize", "maximize")
        assert metric.unit
        assert metric.description
        assert name.endswith("_s") == (metric.unit == "s" and not name.endswith("per_s")) or metric.unit != "s"
    assert names() == tuple(METRICS)


def test_values_are_those_of_the_definitions() -> None:
    values = compute_all(measurement()).values
    assert values["ttft_p95_s"] == pytest.approx(1.0)
    assert values["ttft_sent_p95_s"] == pytest.approx(0.999)
    assert values["ttft_per_1k_prompt_mean_s"] == pytest.approx(0.5)
    assert values["tpot_p99_s"] == pytest.approx(0.1)
    assert values["itl_max_s"] == pytest.approx(0.1)
    assert values["itl_std_s"] == pytest.approx(0.0, abs=1e-9)
    assert values["e2el_p50_s"] == pytest.approx(1.4)
    assert values["queue_mean_s"] == pytest.approx(0.248)
    assert values["start_s"] == 20.0


def test_metrics_by_prompt_length_are_those_of_the_requests_of_that_length() -> None:
    short = [record(i, prompt_tokens=512) for i in range(10)]
    long = [record(i, prompt_tokens=2048, scheduled_s=float(i) - 4.0) for i in range(10, 20)]
    values = compute_all(measurement(requests=(*short, *long))).values
    assert values["ttft_p95_s@512"] == pytest.approx(1.0)
    assert values["ttft_p95_s@2048"] == pytest.approx(5.0)
    assert 1.0 < values["ttft_p95_s"] <= 5.0


def test_lost_requests_add_nothing_and_never_become_zero() -> None:
    lost = record(99, error="cancelled", first_token_s=None, last_token_s=None, output_tokens=0, token_times_s=())
    whole = measurement()
    computed = compute_all(dataclasses.replace(whole, requests=(*whole.requests, lost)), SLO)
    unchanged = compute_all(whole, SLO)
    arrivals = {"achieved_rate_per_s", "requested_rate_per_s"}
    assert {n: v for n, v in computed.values.items() if n not in arrivals} == {
        n: v for n, v in unchanged.values.items() if n not in arrivals
    }
    assert computed.intervals == unchanged.intervals


def test_the_order_of_the_records_changes_nothing() -> None:
    whole = measurement(requests=tuple(record(i, prompt_tokens=512 * (i % 3 + 1), repeat=i % 2) for i in range(30)))
    turned = dataclasses.replace(whole, requests=whole.requests[::-1])
    assert compute_all(turned, SLO).intervals == compute_all(whole, SLO).intervals


def test_without_any_served_request_latencies_are_absent() -> None:
    values = compute_all(measurement(requests=(record(0, error="cancelled"),))).values
    assert not any(name.startswith(("ttft", "tpot", "itl", "e2el", "queue")) for name in values)
    assert "requests_per_s" not in values


def test_single_token_answers_leave_tpot_and_itl_undefined() -> None:
    values = compute_all(measurement(requests=tuple(record(i, output_tokens=1) for i in range(20)))).values
    assert "ttft_p95_s" in values
    assert not any(name.startswith(("tpot", "itl")) for name in values)


def test_one_request_has_values_but_no_interval() -> None:
    computed = compute_all(measurement(requests=(record(0),)))
    assert computed.values["ttft_p95_s"] == pytest.approx(1.0)
    assert not computed.intervals


def test_the_largest_value_has_no_interval() -> None:
    assert not any("_max_" in name for name in compute_all(measurement()).intervals)


def test_percentiles_that_rest_on_too_few_requests_are_said() -> None:
    notes = compute_all(measurement(requests=tuple(record(i) for i in range(19)))).notes
    assert any(n.startswith("p95 rests on fewer than 20 values: ttft_p95_s (19)") for n in notes)
    assert any(n.startswith("p99 rests on fewer than 100 values") for n in notes)
    assert not any(n.startswith("p90") for n in notes)


def test_enough_requests_need_no_note() -> None:
    assert compute_all(measurement(requests=tuple(record(i) for i in range(100)))).notes == ()


def test_unknown_starts_are_absent_not_zero() -> None:
    engine = dataclasses.replace(measurement().engine, start_s=0.0, warmup_s=0.0, stop_s=0.0)
    assert not {"start_s", "warmup_s", "stop_s"} & set(compute_all(measurement(engine=engine)).values)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("ttft_p95_s", "s"), ("ttft_p95_s@2048", "s"), ("itl_std_s@1025-2048", "s"), ("tpot_mean_s@512_corrected", "s")],
)
def test_lookup_finds_plain_grouped_and_corrected_names(name: str, unit: str) -> None:
    assert lookup(name).name == name
    assert lookup(name).unit == unit


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("ttft_p95_ms", "ttft_p95_s"),
        ("tpot_p95", "tpot_p95_s"),
        ("requests_per_sec", "requests_per_s"),
        ("kv_use_max@2048", "kv_use_max"),
        ("kv_use_max_corrected", "kv_use_max"),
        ("zzz", None),
        ("", None),
    ],
)
def test_a_misspelt_metric_is_refused_with_the_nearest_name(name: str, suggestion: str | None) -> None:
    with pytest.raises(UnknownMetricError) as caught:
        lookup(name)
    assert caught.value.suggestion == suggestion


seconds = st.floats(min_value=0.0, max_value=1e4, allow_nan=False)


@st.composite
def any_record(draw: st.DrawFn, index: int) -> RequestRecord:
    at = draw(seconds)
    arrivals = tuple(sorted(at + draw(seconds) for _ in range(draw(st.integers(0, 4)))))
    return record(
        index,
        scheduled_s=at,
        sent_s=at + draw(seconds),
        prompt_tokens=draw(st.integers(0, 4096)),
        output_tokens=len(arrivals),
        token_times_s=arrivals,
        queued_s=draw(st.none() | seconds),
        error=draw(st.none() | st.just("lost")),
        repeat=draw(st.integers(0, 2)),
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 8).flatmap(lambda n: st.tuples(*(any_record(i) for i in range(n)))), st.booleans())
def test_no_metric_and_no_interval_is_ever_nan_or_infinite(
    records: tuple[RequestRecord, ...], with_steps: bool
) -> None:
    steps = (step(prefix_queries=0),) if with_steps else ()
    computed = compute_all(measurement(requests=records, steps=steps, duration_s=(1.0, 0.5, 2.0)), SLO)
    assert all(map(math.isfinite, computed.values.values()))
    for name, (low, high) in computed.intervals.items():
        assert math.isfinite(low)
        assert low <= computed.values[name] <= high


@pytest.mark.parametrize(("requests", "tokens", "limit_s"), [(1000, 48, 3.0), (1000, 1000, 6.0)])
def test_computing_everything_takes_about_a_second(requests: int, tokens: int, limit_s: float) -> None:
    whole = large(requests, tokens)
    start = time.process_time()
    computed = compute_all(whole, SLO)
    assert time.process_time() - start < limit_s
    assert len(computed.intervals) > 60
