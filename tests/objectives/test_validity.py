import dataclasses
from typing import Any

import pytest
from measurement_samples import EXPECTED, PROBE, device_sample, measurement, record, step, with_requests

from objectives.measurement import Measurement, RequestRecord, SpeedProbe
from objectives.validity import (
    NOTE_CLIENT_LATENESS,
    NOTE_FOREIGN_PROCESSES,
    NOTE_HELD_BACK,
    NOTE_UNSENT,
    Expectations,
    Reference,
    ValidityLimits,
    VoidReason,
    throttled_share,
    void_reasons,
)

COOL = Reference(throttled_share=0.0, probe=PROBE)
SHARED = dataclasses.replace(EXPECTED, shares_prefixes=True)
HEAT = 0x40


def reasons(whole: Measurement, expected: Expectations = EXPECTED) -> dict[str, VoidReason]:
    return {r.code: r for r in void_reasons(whole, COOL, expected)}


def late(seconds: float, every: int = 1) -> tuple[RequestRecord, ...]:
    return tuple(record(i, sent_s=i + (seconds if i % every == 0 else 0.0)) for i in range(20))


def hot(share: float) -> Measurement:
    readings = 100
    return measurement(
        device=tuple(device_sample(i, throttle_reasons=HEAT if i < share * readings else 0) for i in range(readings))
    )


def test_a_whole_undisturbed_measurement_is_valid() -> None:
    assert reasons(measurement()) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "ConnectionError: reset"},
        {"finish_reason": "abort"},
        {"first_token_s": None, "last_token_s": None, "output_tokens": 0, "token_times_s": ()},
    ],
)
def test_a_lost_request_voids_the_run(changes: dict[str, Any]) -> None:
    found = reasons(with_requests(**changes))
    assert found["lost_requests"].value == 1
    assert (changes.get("error") or "no complete answer") in found["lost_requests"].evidence


def test_requests_that_were_never_sent_are_lost() -> None:
    whole = measurement()
    assert reasons(dataclasses.replace(whole, requests=whole.requests[:-2]))["lost_requests"].value == 2
    assert reasons(measurement(notes={NOTE_UNSENT: 3.0}))["lost_requests"].value == 3
    assert "lost_requests" in reasons(measurement(requests=()))


def test_fewer_tokens_than_asked_for_void_the_run() -> None:
    assert reasons(with_requests(output_tokens=3))["lost_tokens"].value == 2


def test_what_is_asked_for_counts_once_a_repeat() -> None:
    requests = tuple(record(i, repeat=r) for r in range(2) for i in range(20))
    assert reasons(measurement(requests=requests, duration_s=(20.4, 20.4))) == {}
    assert "lost_requests" in reasons(measurement(duration_s=(20.4, 20.4)))


def test_too_few_requests_void_the_run() -> None:
    whole = measurement(requests=tuple(record(i) for i in range(9)))
    assert reasons(whole, Expectations(9, 45))["too_few_requests"].value == 9


def test_a_client_that_falls_behind_voids_the_run() -> None:
    assert reasons(measurement(requests=late(0.5)))["client_late"].value == pytest.approx(0.5)
    assert "client_late" not in reasons(measurement(requests=late(0.05)))


def test_the_wait_for_the_cap_on_concurrency_is_not_held_against_the_client() -> None:
    requests = tuple(record(i, sent_s=3.0 * i) for i in range(20))
    assert reasons(measurement(requests=requests, notes={NOTE_HELD_BACK: 19.0})) == {}
    assert {"client_late", "arrival_rate"} <= set(reasons(measurement(requests=requests)))


def test_lateness_that_the_client_measured_itself_counts_under_a_cap_too() -> None:
    notes = {NOTE_HELD_BACK: 19.0, NOTE_CLIENT_LATENESS: 0.4}
    assert reasons(measurement(notes=notes))["client_late"].value == 0.4
    on_time = measurement(requests=late(0.5), notes={NOTE_CLIENT_LATENESS: 0.002})
    assert "client_late" not in reasons(on_time)


def test_an_achieved_rate_that_is_not_the_requested_one_voids_the_run() -> None:
    requests = tuple(record(i, sent_s=1.1 * i) for i in range(20))
    found = reasons(measurement(requests=requests, notes={NOTE_CLIENT_LATENESS: 0.0}))
    assert found["arrival_rate"].value == pytest.approx(1 / 1.1 - 1)


def test_jitter_of_a_short_burst_is_not_a_wrong_rate() -> None:
    requests = tuple(record(i, scheduled_s=0.001 * i, sent_s=0.002 * i) for i in range(20))
    assert "arrival_rate" not in reasons(measurement(requests=requests))


def test_clocks_slowed_beyond_what_the_reference_saw_void_the_run() -> None:
    assert reasons(hot(0.2))["throttled"].value == pytest.approx(0.2)
    assert "throttled" not in reasons(hot(0.04))
    accustomed = Reference(throttled_share=0.2)
    assert not void_reasons(hot(0.2), accustomed, EXPECTED)
    assert void_reasons(hot(0.3), accustomed, EXPECTED)


def test_the_reference_itself_is_not_judged_by_its_throttling() -> None:
    assert not void_reasons(hot(0.9), None, EXPECTED)
    assert Reference.of(hot(0.9)).throttled_share == pytest.approx(0.9)


def test_the_power_cap_and_the_host_are_no_throttling() -> None:
    samples = (device_sample(throttle_reasons=0x04), device_sample(device="host", throttle_reasons=HEAT))
    assert throttled_share(measurement(device=samples)) == 0.0
    assert throttled_share(measurement(device=())) is None


def test_the_hottest_device_counts() -> None:
    samples = (device_sample(throttle_reasons=0), device_sample(device="GPU-2", throttle_reasons=HEAT))
    assert throttled_share(measurement(device=samples)) == 1.0


def test_a_foreign_process_on_the_device_voids_the_run() -> None:
    assert reasons(measurement(notes={NOTE_FOREIGN_PROCESSES: 1.0}))["foreign_process"].value == 1.0
    assert reasons(measurement(notes={NOTE_FOREIGN_PROCESSES: 0.0})) == {}


def test_prefix_hits_void_a_run_that_shares_no_prefix() -> None:
    whole = measurement(steps=(step(prefix_queries=1000, prefix_hits=20),))
    assert reasons(whole)["prefix_hits"].value == pytest.approx(0.02)
    assert reasons(whole, SHARED) == {}
    assert reasons(measurement(steps=(step(prefix_queries=1000, prefix_hits=5),))) == {}


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_a_machine_that_changed_its_speed_voids_the_run(factor: float) -> None:
    after = SpeedProbe(PROBE.prefill_s * factor, PROBE.decode_step_s * factor)
    assert reasons(measurement(speed_after=after))["speed_changed"].value == pytest.approx(factor)


def test_a_small_change_of_speed_or_a_missing_probe_is_no_reason() -> None:
    after = SpeedProbe(PROBE.prefill_s * 1.2, PROBE.decode_step_s * 1.2)
    assert reasons(measurement(speed_after=after)) == {}
    assert reasons(measurement(speed_before=None, speed_after=None)) == {}


def test_single_token_answers_void_a_study_of_tpot_only() -> None:
    whole = measurement(requests=tuple(record(i, output_tokens=1) for i in range(20)))
    assert "single_tokens" in reasons(whole, Expectations(20, 20, objectives=("tpot_p95_s",)))
    assert reasons(whole, Expectations(20, 20, objectives=("ttft_p95_s",))) == {}


def test_limits_can_be_set() -> None:
    strict = ValidityLimits(client_lateness_p99_s=0.0001)
    assert [r.code for r in void_reasons(measurement(), COOL, EXPECTED, strict)] == ["client_late"]
