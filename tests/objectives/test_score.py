import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_samples import EXPECTED, PROBE, measurement, record, step

from objectives.constraints import Constraint
from objectives.measurement import Measurement, SpeedProbe
from objectives.score import Score, UserMetric, score
from objectives.validity import Expectations, Reference


def scored(whole: Measurement | None = None, **options: Any) -> Score:
    return score(whole or measurement(), **({"expectations": EXPECTED} | options))


def codes(result: Score) -> list[str]:
    return [r.code for r in result.void]


def test_a_valid_measurement_is_scored_with_memory_as_a_constraint() -> None:
    result = scored()
    assert result.values["ttft_p95_s"] == pytest.approx(1.0)
    low, high = result.intervals["tpot_p95_s"]
    assert low <= result.values["tpot_p95_s"] <= high
    assert result.violations == {"memory": pytest.approx(-0.1)}
    assert result.feasible
    assert result.void == ()


def test_a_constraint_is_a_signed_relative_violation() -> None:
    result = scored(constraints=[Constraint.parse("ttft_p95_s <= 2"), Constraint.parse("output_tokens_per_s>=10")])
    assert result.violations["ttft_p95_s <= 2"] == pytest.approx(-0.5)
    assert result.violations["output_tokens_per_s >= 10"] == pytest.approx((10 - 100 / 20.4) / 10)
    assert not result.feasible


def test_a_missing_objective_or_constrained_metric_voids_and_is_never_zero() -> None:
    whole = measurement(requests=tuple(record(i, output_tokens=1) for i in range(20)))
    result = scored(
        whole, expectations=Expectations(20, 20, objectives=("tpot_p95_s",)), constraints=[Constraint("own", "<=", 1.0)]
    )
    assert codes(result) == ["single_tokens", "missing_metric", "missing_metric"]
    assert "tpot_p95_s" not in result.values
    assert "own <= 1" not in result.violations


def test_metrics_of_the_user_are_objectives_like_ours() -> None:
    result = scored(
        user_metrics={"per_request": lambda m: m.duration_s[0] / len(m.requests)},
        constraints=[Constraint.parse("per_request <= 1")],
        expectations=dataclasses.replace(EXPECTED, objectives=("per_request",)),
    )
    assert result.values["per_request"] == pytest.approx(1.02)
    assert result.violations["per_request <= 1"] == pytest.approx(0.02)
    assert result.void == ()


@pytest.mark.parametrize(
    ("metric", "words"),
    [(lambda _: math.nan, "nan"), (lambda _: math.inf, "inf"), (lambda m: 1 / 0, "ZeroDivisionError")],
)
def test_a_user_metric_that_fails_voids_the_trial_with_the_cause(metric: UserMetric, words: str) -> None:
    result = scored(user_metrics={"own": metric})
    assert codes(result) == ["user_metric"]
    assert words in result.void[0].evidence
    assert "own" not in result.values


def test_a_user_metric_may_not_take_a_name_of_ours() -> None:
    with pytest.raises(ValueError, match="ttft_p95_s"):
        scored(user_metrics={"ttft_p95_s": lambda _: 0.0})


def test_the_speed_index_is_recorded_and_corrected_values_stand_beside_the_raw_ones() -> None:
    twice_as_fast = Reference(0.0, SpeedProbe(PROBE.prefill_s / 2, PROBE.decode_step_s / 2))
    plain, corrected = scored(reference=twice_as_fast), scored(reference=twice_as_fast, correct_speed=True)
    assert plain.values["speed_index"] == pytest.approx(2.0)
    assert not any(name.endswith("_corrected") for name in plain.values)
    assert corrected.values["ttft_p95_s"] == pytest.approx(1.0)
    assert corrected.values["ttft_p95_s_corrected"] == pytest.approx(0.5)
    assert corrected.intervals["ttft_p95_s_corrected"][1] == pytest.approx(corrected.intervals["ttft_p95_s"][1] / 2)


def test_the_reference_has_speed_index_one_against_itself() -> None:
    whole = measurement(speed_after=SpeedProbe(PROBE.prefill_s * 1.1, PROBE.decode_step_s))
    assert scored(whole, reference=Reference.of(whole)).values["speed_index"] == pytest.approx(1.0)


def test_without_a_probe_there_is_no_index() -> None:
    result = scored(measurement(speed_before=None, speed_after=None), reference=Reference(0.0, PROBE))
    assert "speed_index" not in result.values


def test_preemptions_are_flagged() -> None:
    assert "3 preemptions" in scored(measurement(steps=(step(preemptions=3),))).notes[-1]


@pytest.mark.parametrize("text", ["ttft_p95_s < 2", "ttft_p95_s <= two", "<= 2", "a <= nan", "a <= 1 and b <= 2", ""])
def test_a_constraint_is_never_evaluated_as_code(text: str) -> None:
    with pytest.raises(ValueError, match="not a constraint"):
        Constraint.parse(text)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.sampled_from(["<=", ">="]))
def test_a_violation_is_positive_exactly_when_the_constraint_is_broken(
    value: float, limit: float, relation: Any
) -> None:
    holds = value <= limit if relation == "<=" else value >= limit
    violation = Constraint("m", relation, limit).violation(value)
    assert math.isfinite(violation)
    assert (violation <= 0) == holds


def test_a_tiny_limit_makes_no_infinite_violation() -> None:
    assert math.isfinite(Constraint("m", "<=", 5e-324).violation(1e6))


@given(st.floats(1e-6, 1e6), st.sampled_from(["<=", ">="]))
def test_a_constraint_reads_its_own_text(limit: float, relation: Any) -> None:
    written = Constraint("itl_p99_s@2048", relation, float(f"{limit:g}"))
    assert Constraint.parse(str(written)) == written
