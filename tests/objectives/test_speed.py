import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_samples import PROBE, measurement

from objectives.measurement import SpeedProbe
from objectives.speed import (
    correct,
    correct_intervals,
    distinguishable,
    drifts,
    mean_probe,
    noise_floor,
    relative_difference,
    speed_index,
)

positive = st.floats(min_value=1e-6, max_value=1e6)
probes = st.builds(SpeedProbe, prefill_s=positive, decode_step_s=positive)


def slower(factor: float) -> SpeedProbe:
    return SpeedProbe(PROBE.prefill_s * factor, PROBE.decode_step_s * factor)


@given(probes, probes)
def test_exchanging_probe_and_reference_gives_the_reciprocal_index(a: SpeedProbe, b: SpeedProbe) -> None:
    assert speed_index(a, b) * speed_index(b, a) == pytest.approx(1.0)
    assert speed_index(a, a) == pytest.approx(1.0)


def test_index_is_the_geometric_mean_of_prefill_and_decode() -> None:
    assert speed_index(SpeedProbe(PROBE.prefill_s * 4.0, PROBE.decode_step_s), PROBE) == pytest.approx(2.0)


@pytest.mark.parametrize("probe", [SpeedProbe(0.0, 0.1), SpeedProbe(0.1, math.nan)])
def test_a_probe_without_a_time_is_refused(probe: SpeedProbe) -> None:
    with pytest.raises(ValueError, match="positive times"):
        speed_index(probe, PROBE)


def test_the_probe_of_a_measurement_is_the_mean_of_before_and_after() -> None:
    around = mean_probe(measurement(speed_before=slower(1.0), speed_after=slower(4.0)))
    assert speed_index(around, PROBE) == pytest.approx(2.0)
    assert mean_probe(measurement(speed_before=None, speed_after=slower(3.0))) == slower(3.0)
    assert mean_probe(measurement(speed_before=None, speed_after=None)) is None


def test_times_are_divided_and_rates_multiplied_under_names_of_their_own() -> None:
    values = {"ttft_p95_s": 4.0, "tpot_p95_s@2048": 0.2, "output_tokens_per_s": 50.0, "kv_use_max": 0.9, "own": 1.0}
    assert correct(values, 2.0) == {
        "ttft_p95_s_corrected": 2.0,
        "tpot_p95_s@2048_corrected": 0.1,
        "output_tokens_per_s_corrected": 100.0,
    }
    assert correct_intervals({"ttft_p95_s": (3.0, 5.0), "own": (0.0, 1.0)}, 2.0) == {"ttft_p95_s_corrected": (1.5, 2.5)}


def test_correcting_twice_does_nothing() -> None:
    assert correct(correct({"ttft_p95_s": 4.0}, 2.0), 2.0) == {}


@given(st.lists(positive, min_size=2, max_size=5), positive)
def test_noise_floor_is_relative(sample: list[float], factor: float) -> None:
    floor = noise_floor([{"m": v} for v in sample])["m"]
    assert floor >= 0
    assert noise_floor([{"m": v * factor} for v in sample])["m"] == pytest.approx(floor, rel=1e-6, abs=1e-9)


def test_noise_floor_of_equal_runs_is_zero_and_undefined_metrics_have_none() -> None:
    assert noise_floor([{"a": 2.0, "zero": 0.0, "b": 1.0}, {"a": 2.0, "zero": 0.0}]) == {"a": 0.0, "zero": 0.0}
    assert noise_floor([{"around_zero": -1.0}, {"around_zero": 1.0}]) == {}


def test_noise_floor_needs_two_runs() -> None:
    with pytest.raises(ValueError, match="two runs"):
        noise_floor([{"a": 1.0}])


def test_about_95_percent_of_further_pairs_stay_below_the_mean_noise_floor() -> None:
    rng = np.random.default_rng(1)
    runs = rng.normal(1.0, 0.05, (500, 3))
    floor = np.mean([noise_floor([{"m": v} for v in row])["m"] for row in runs])
    pairs = rng.normal(1.0, 0.05, (2000, 2))
    apart = np.mean([distinguishable(a, b, floor) for a, b in pairs])
    assert 0.03 < apart < 0.07


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_relative_difference_is_symmetric_and_bounded(a: float, b: float) -> None:
    assert relative_difference(a, b) == relative_difference(b, a)
    assert 0.0 <= relative_difference(a, b) <= 2.0


def test_sentinels_beyond_the_floor_are_named_with_their_place() -> None:
    series = [{"t": 1.0, "u": 5.0}, {"t": 1.02, "u": 5.0}, {"t": 1.3, "u": 5.0}, {"u": 4.0}]
    found = drifts(series, {"t": 0.05, "u": 0.1, "missing": 0.1})
    assert [(d.index, d.metric) for d in found] == [(2, "t"), (3, "u")]
    assert found[0].relative_change == pytest.approx(0.3)
    assert drifts(series[:1], {"t": 0.05}) == ()
    assert drifts([], {"t": 0.05}) == ()
