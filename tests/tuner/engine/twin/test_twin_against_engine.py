"""The twin against runs of the real CPU engine that were recorded once."""

from __future__ import annotations

import pytest
from recorded_runs import RUNS, recorded
from twin_samples import percentile_s

from objectives.measurement import Failure, Measurement
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.calibrate import calibrate_by_probe, probe_speed
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial, replay


def predict(twin: TwinEngine, trial: MeasuredTrial) -> Measurement:
    result = twin.run(trial.config, trial.workload, MeasurePlan(), lambda _: None)
    assert isinstance(result, Measurement), result
    return result


@pytest.mark.parametrize("name", RUNS)
def test_every_step_of_the_engine_is_scheduled_again(twin: TwinEngine, name: str) -> None:
    trial = recorded(name)
    prepared = twin.prepare(trial.config)
    assert not isinstance(prepared, Failure)
    assert prepared.pool.tokens == trial.measurement.engine.kv_tokens
    replayed = replay(trial, prepared)
    assert replayed.agreement == 1.0
    assert len(replayed.loads) == len(trial.measurement.steps)


def test_preemptions_and_prefix_hits_are_those_of_the_engine(twin: TwinEngine) -> None:
    trial = recorded("preempted")
    calibrated = twin.with_coefficients(calibrate_by_probe([trial], twin))
    measured, predicted = trial.measurement, predict(calibrated, trial)
    assert sum(r.preemptions for r in measured.requests) == 4
    for one, other in zip(measured.requests, predicted.requests, strict=True):
        assert (one.preemptions, one.cached_tokens) == (other.preemptions, other.cached_tokens)
    for total in ("prefill_tokens", "prefix_queries", "prefix_hits"):
        assert sum(getattr(s, total) for s in measured.steps) == sum(getattr(s, total) for s in predicted.steps)
    # A preemption one step earlier or later recomputes one token less or more.
    decoded = [sum(s.decode_tokens for s in m.steps) for m in (measured, predicted)]
    assert abs(decoded[0] - decoded[1]) <= 4


@pytest.mark.parametrize("what", ["ttft", "tpot"])
def test_calibrated_on_two_configurations_it_predicts_a_third(twin: TwinEngine, what: str) -> None:
    coefficients = calibrate_by_probe([recorded("large"), recorded("small")], twin)
    third = recorded("narrow")
    predicted = predict(twin.with_coefficients(coefficients), third)
    for q in (50, 95):
        assert percentile_s(predicted, what, q) == pytest.approx(percentile_s(third.measurement, what, q), rel=0.15)


def test_the_probe_tells_the_machine_from_the_configuration(twin: TwinEngine) -> None:
    trials = [recorded(name) for name in RUNS[:3]]
    calibrated = twin.with_coefficients(calibrate_by_probe(trials, twin))
    for trial in trials:  # recorded within minutes on a steady machine, with chunks of 2048, 128 and 256 tokens
        assert probe_speed(trial, calibrated) == pytest.approx(1.0, abs=0.08)
