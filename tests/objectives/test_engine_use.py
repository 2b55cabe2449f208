import pytest
from measurement_samples import GPU, device_sample, measurement, record, step

from objectives.engine_use import device_use, energy_per_output_token_j, prefix_hit_rate, step_use


def test_means_over_steps_are_weighted_by_their_length() -> None:
    steps = (step(kv_usage=0.2, running=1, duration_s=3.0), step(kv_usage=0.6, running=5, duration_s=1.0))
    values = step_use(measurement(steps=steps))
    assert values["kv_use_mean"] == pytest.approx(0.3)
    assert values["running_mean"] == pytest.approx(2.0)
    assert values["kv_use_max"] == 0.6
    assert values["running_max"] == 5.0


def test_steps_without_length_still_have_a_mean() -> None:
    steps = (step(kv_usage=0.2, duration_s=0.0), step(kv_usage=0.6, duration_s=0.0))
    assert step_use(measurement(steps=steps))["kv_use_mean"] == pytest.approx(0.4)


def test_preemptions_add_up() -> None:
    assert step_use(measurement(steps=(step(preemptions=2), step(preemptions=1))))["preemptions"] == 3.0


def test_without_step_rows_nothing_is_claimed() -> None:
    assert step_use(measurement(steps=())) == {}


def test_hit_rate_is_taken_from_tokens_of_the_steps_and_else_of_the_requests() -> None:
    assert prefix_hit_rate(measurement(steps=(step(prefix_queries=100, prefix_hits=25),))) == 0.25
    by_request = measurement(steps=(), requests=(record(0, cached_tokens=500), record(1, cached_tokens=None)))
    assert prefix_hit_rate(by_request) == 0.25
    assert prefix_hit_rate(measurement(steps=(), requests=(record(0, cached_tokens=None),))) is None


def test_a_peak_is_that_of_the_fullest_accelerator_and_the_host_stays_apart() -> None:
    samples = (
        device_sample(memory_used_gib=30.0),
        device_sample(memory_used_gib=38.0, device="GPU-2", temperature_c=81.0),
        device_sample(memory_used_gib=100.0, device="host", utilisation=0.25, power_w=None),
    )
    values = device_use(measurement(device=samples))
    assert values["device_memory_peak_gib"] == 38.0
    assert values["device_temperature_max_c"] == 81.0
    assert values["device_utilisation_mean"] == pytest.approx(0.9)
    assert values["host_memory_peak_gib"] == 100.0
    assert values["host_utilisation_mean"] == 0.25


def test_what_a_device_does_not_offer_is_absent() -> None:
    bare = device_sample(memory_used_gib=None, utilisation=None, power_w=None, temperature_c=None, sm_clock_mhz=None)
    assert device_use(measurement(device=(bare, bare))) == {}


def test_energy_integrates_power_over_all_accelerators_by_trapezoids() -> None:
    samples = (
        device_sample(0.0, power_w=100.0),
        device_sample(10.0, power_w=300.0),
        device_sample(0.0, device="GPU-2", power_w=50.0),
        device_sample(10.0, device="GPU-2", power_w=50.0),
        device_sample(0.0, device="host", power_w=1000.0),
        device_sample(10.0, device="host", power_w=1000.0),
    )
    whole = measurement(device=samples, requests=(record(0, output_tokens=100),))
    assert energy_per_output_token_j(whole) == pytest.approx(25.0)


def test_energy_skips_the_time_between_repeats() -> None:
    at = (0.0, 10.0, 0.0, 10.0)
    whole = measurement(
        device=tuple(device_sample(t, power_w=100.0, device=GPU) for t in at),
        requests=(record(0, output_tokens=10), record(0, output_tokens=10, repeat=1)),
        duration_s=(10.0, 10.0),
    )
    assert energy_per_output_token_j(whole) == pytest.approx(100.0)


def test_energy_needs_two_readings_and_output() -> None:
    assert energy_per_output_token_j(measurement(device=(device_sample(),))) is None
    assert energy_per_output_token_j(measurement(requests=())) is None
