import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from measurement_samples import measurement, record

from objectives.intervals import Interval
from objectives.latency import Latencies
from objectives.measurement import Measurement
from objectives.throughput import arrival_rates, check_slo, meets_slo, rates


def computed(
    whole: Measurement, slo: Mapping[str, float] | None = None
) -> tuple[dict[str, float], dict[str, Interval]]:
    return rates(whole, Latencies.of(whole.requests), slo)


def test_rates_are_sums_over_the_length_of_the_run() -> None:
    values, _ = computed(measurement(duration_s=(10.0,)))
    assert values == {"requests_per_s": 2.0, "output_tokens_per_s": 10.0, "total_tokens_per_s": 4010.0}


def test_a_lost_request_adds_nothing() -> None:
    whole = measurement(duration_s=(10.0,))
    lost = dataclasses.replace(whole.requests[0], error="cancelled")
    values, _ = computed(dataclasses.replace(whole, requests=(lost, *whole.requests[1:])))
    assert values["requests_per_s"] == 1.9
    assert values["output_tokens_per_s"] == 9.5


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    requests = (
        record(0),
        record(1, scheduled_s=-4.0),
        record(2, last_token_s=9.0),
        record(3, output_tokens=1),
    )
    whole = measurement(requests=requests, duration_s=(2.0,))
    values, intervals = computed(whole, {"ttft_s": 2.0, "tpot_s": 0.2})
    assert values["goodput_requests_per_s"] == 1.0
    assert intervals["goodput_requests_per_s"][0] < 1.0 < intervals["goodput_requests_per_s"][1]


def test_a_single_token_has_no_tpot_that_could_be_too_long() -> None:
    assert meets_slo(Latencies.of([record(output_tokens=1)]), {"tpot_s": 0.01}).tolist() == [1.0]


@pytest.mark.parametrize(("slo", "words"), [({"itl_s": 1.0}, "itl_s"), ({"ttft_s": 0.0}, "positive")])
def test_a_service_level_that_cannot_be_is_refused_by_name(slo: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_slo(slo)


def test_rates_of_repeats_have_an_interval_and_those_of_one_run_have_none() -> None:
    requests = tuple(record(i, repeat=r) for r in range(3) for i in range(10))
    repeated = measurement(requests=requests, duration_s=(5.0, 10.0, 20.0))
    values, intervals = computed(repeated)
    low, high = intervals["requests_per_s"]
    assert values["requests_per_s"] == pytest.approx(30 / 35)
    assert low < 30 / 35 < high
    assert computed(measurement())[1] == {}


def test_a_run_without_length_or_requests_has_no_rates() -> None:
    assert computed(measurement(duration_s=(0.0,))) == ({}, {})
    assert computed(measurement(requests=())) == ({}, {})
    assert computed(measurement(duration_s=())) == ({}, {})


def test_arrival_rates_compare_the_timetable_with_what_was_sent() -> None:
    requests = tuple(record(i, scheduled_s=0.5 * i, sent_s=1.0 * i) for i in range(11))
    assert arrival_rates(measurement(requests=requests)) == {"requested_rate_per_s": 2.0, "achieved_rate_per_s": 1.0}


def test_arrivals_all_at_once_have_no_rate() -> None:
    requests = tuple(record(i, scheduled_s=0.0, sent_s=0.0) for i in range(5))
    assert arrival_rates(measurement(requests=requests)) == {}
    assert arrival_rates(measurement(requests=())) == {}


def test_arrival_rate_leaves_out_the_time_between_repeats() -> None:
    requests = tuple(record(i, scheduled_s=0.5 * i, repeat=r) for r in range(2) for i in range(5))
    assert arrival_rates(measurement(requests=requests))["requested_rate_per_s"] == pytest.approx(2.0)
    assert np.isfinite(list(arrival_rates(measurement(requests=requests)).values())).all()
