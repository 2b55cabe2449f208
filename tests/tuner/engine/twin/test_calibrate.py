from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_samples import SMOLLM2, cpu_config, percentile_s, poisson

from objectives.measurement import Failure, Measurement
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.calibrate import (
    Followed,
    calibrate,
    calibrate_by_probe,
    fit_sets,
    follow,
    own_speed,
    robust_nonnegative_fit,
    speed_among,
)
from tuner.engine.twin.coefficient_sets import calibration_key
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.play import VirtualRun
from tuner.engine.twin.replay import MeasuredTrial, replay
from tuner.engine.twin.steptime import Coefficients, StepLoad
from tuner.engine.twin.vllm_scheduler import VirtualScheduler
from tuner.workload.model import Workload

TRUTH = Coefficients(
    {"step": 2.0, "linear": 0.7, "token": 3.0, "prefill_attention": 4.0, "decode_attention": 1.6, "request": 1.3}
)
"""What the machine of these tests is like; calibration sees only what it measures."""

WORKLOAD = poisson(30, 2.0, output_tokens=60)


def machine(config: EngineConfig, workload: Workload, repeats: int = 1, speed: float = 1.0) -> Measurement:
    engine = TwinEngine(find_device("cpu"), SMOLLM2, coefficients=TRUTH.scaled(speed))
    result = engine.run(config, workload, MeasurePlan(repeats=repeats), lambda _: None)
    assert isinstance(result, Measurement), result
    return result


def noisy_machine(config: EngineConfig, workload: Workload) -> Measurement:
    """The same machine, each step off by 5%, and one in fifty held up for five times as long."""
    clean = machine(config, workload)
    prepared = TwinEngine(find_device("cpu"), SMOLLM2, coefficients=TRUTH).prepare(config)
    assert not isinstance(prepared, Failure)
    chance = random.Random(3)
    truth = prepared.cost

    def cost(load: StepLoad) -> float:
        return truth(load) * chance.lognormvariate(0, 0.05) * (5.0 if chance.random() < 0.02 else 1.0)

    disturbed = dataclasses.replace(prepared, cost=cost)  # type: ignore[arg-type]  # called like the one it disturbs
    run = VirtualRun(VirtualScheduler(prepared.resolved, prepared.pool_blocks), disturbed, workload, 0)
    assert run.play(1e6) is None
    return dataclasses.replace(
        clean, requests=tuple(run.records()), steps=tuple(run.steps), duration_s=(run.duration_s,)
    )


def trial(speed: float = 1.0, repeats: int = 1, **args: object) -> MeasuredTrial:
    config = cpu_config(**args)
    return MeasuredTrial(config, WORKLOAD, machine(config, WORKLOAD, repeats, speed), speed)


@pytest.mark.parametrize(
    "args",
    [{}, {"max_num_batched_tokens": 64, "max_num_seqs": 3}, {"enable_prefix_caching": True}],
    ids=["plain", "small", "caching"],
)
def test_replay_finds_what_every_step_computed(twin: TwinEngine, args: dict[str, object]) -> None:
    measured = trial(repeats=2, **args)
    prepared = twin.prepare(measured.config)
    assert not isinstance(prepared, Failure)
    replayed = replay(measured, prepared)
    assert replayed.agreement == 1.0
    assert len(replayed.loads) == len(measured.measurement.steps)
    assert sum(replayed.seconds) == pytest.approx(sum(s.duration_s for s in measured.measurement.steps), rel=0.01)


def test_replay_follows_preemptions(twin: TwinEngine) -> None:
    config = cpu_config(kv_cache_memory_bytes=48 * 2**20)
    workload = poisson(12, 50.0, prompt_tokens=(250, 300), output_tokens=200)
    measurement = machine(config, workload)
    prepared = twin.prepare(config)
    assert sum(r.preemptions for r in measurement.requests) > 0
    assert not isinstance(prepared, Failure)
    replayed = replay(MeasuredTrial(config, workload, measurement), prepared)
    assert replayed.agreement > 0.99


def test_a_calibrated_twin_predicts_other_configurations(twin: TwinEngine) -> None:
    trials = [trial(), trial(max_num_batched_tokens=64, max_num_seqs=2), trial(max_num_batched_tokens=1024)]
    engine = TwinEngine(find_device("cpu"), SMOLLM2, coefficients=calibrate(trials, twin))
    other = cpu_config(max_num_batched_tokens=512, max_num_seqs=4)
    workload = poisson(25, 3.0, prompt_tokens=(100, 900), output_tokens=30, seed=11)
    predicted = engine.run(other, workload, MeasurePlan(), lambda _: None)
    assert isinstance(predicted, Measurement)
    truth = machine(other, workload)
    for what in ("ttft", "tpot"):
        assert percentile_s(predicted, what, 95) == pytest.approx(percentile_s(truth, what, 95), rel=0.05)


def predicted_p95_s(coefficients: Coefficients, what: str) -> float:
    engine = TwinEngine(find_device("cpu"), SMOLLM2, coefficients=coefficients)
    result = engine.run(cpu_config(), WORKLOAD, MeasurePlan(), lambda _: None)
    assert isinstance(result, Measurement)
    return percentile_s(result, what, 95)


@pytest.mark.parametrize("what", ["ttft", "tpot"])
def test_noise_and_outliers_hardly_move_the_fit(twin: TwinEngine, what: str) -> None:
    clean = trial()
    disturbed = MeasuredTrial(clean.config, WORKLOAD, noisy_machine(clean.config, WORKLOAD))
    fits = [calibrate([t], twin) for t in (clean, disturbed)]
    assert predicted_p95_s(fits[1], what) == pytest.approx(predicted_p95_s(fits[0], what), rel=0.05)


@pytest.mark.parametrize("what", ["ttft", "tpot"])
def test_a_slow_hour_is_taken_out_by_the_speed_index(twin: TwinEngine, what: str) -> None:
    normal, slow = calibrate([trial()], twin), calibrate([trial(speed=1.6)], twin)
    assert predicted_p95_s(slow, what) == pytest.approx(predicted_p95_s(normal, what), rel=0.03)


def test_what_no_trial_shows_stays_as_the_catalogue_has_it(twin: TwinEngine) -> None:
    fitted = calibrate([trial()], twin)
    assert {"eager", "communication"}.isdisjoint(fitted.fitted)
    assert fitted.values["eager"] == fitted.values["communication"] == 1.0


def test_what_every_step_pays_for_being_eager_moves_with_the_rest_until_some_step_does_not(twin: TwinEngine) -> None:
    eager, compiled = trial(enforce_eager=True), trial(max_num_seqs=3)
    alone, both = calibrate([eager], twin), calibrate([eager, compiled], twin)
    assert "eager" not in alone.fitted
    assert 0.5 < alone.values["eager"] < 3.0
    assert "eager" in both.fitted


@pytest.mark.parametrize("known", [1.0, 1.6], ids=["steady", "drifting"])
def test_a_trial_of_a_slow_hour_is_recognised_by_its_own_steps(twin: TwinEngine, known: float) -> None:
    trials = [trial(), dataclasses.replace(trial(speed=known, max_num_seqs=2), speed=1.0)]
    blind = [dataclasses.replace(t, measurement=without_probes(t.measurement)) for t in trials]
    found = calibrate_by_probe(blind, twin)
    speeds = [own_speed(followed(t, twin), found) for t in blind]
    assert speeds[1] / speeds[0] == pytest.approx(known, rel=0.05)


def test_a_trials_probe_counts_against_the_probes_of_those_calibrated_on(twin: TwinEngine) -> None:
    basis = [with_probes(trial(), 1.1), with_probes(trial(max_num_seqs=2), 1.1)]
    calibrated = twin.with_coefficients(fit_sets([followed(t, twin) for t in basis], twin))
    slow = with_probes(trial(max_num_seqs=4), 1.1 * 1.3)
    assert speed_among(slow, basis, calibrated) == pytest.approx(1.3, rel=0.02)
    unseen = dataclasses.replace(slow, measurement=without_probes(slow.measurement))
    assert speed_among(unseen, basis, calibrated) is None


def with_probes(measured: MeasuredTrial, longer: float) -> MeasuredTrial:
    """The same trial, whose probes took so many times as long as its steps say."""
    before, after = (
        dataclasses.replace(p, prefill_s=p.prefill_s * longer)
        for p in (measured.measurement.speed_before, measured.measurement.speed_after)
        if p is not None
    )
    measurement = dataclasses.replace(measured.measurement, speed_before=before, speed_after=after)
    return dataclasses.replace(measured, measurement=measurement)


def without_probes(measurement: Measurement) -> Measurement:
    return dataclasses.replace(measurement, speed_before=None, speed_after=None)


def followed(measured: MeasuredTrial, twin: TwinEngine, most_steps: int | None = None) -> Followed:
    found = follow(measured, twin, most_steps)
    assert found is not None
    return found


def test_a_long_trial_is_followed_for_as_many_steps_as_asked(twin: TwinEngine) -> None:
    long = trial(repeats=2)
    assert len(followed(long, twin, 60).measured_s) == 60
    assert len(followed(long, twin).measured_s) == len(long.measurement.steps)


def test_kernels_get_coefficients_of_their_own_and_unmeasured_ones_those_of_all(twin: TwinEngine) -> None:
    plain, other = cpu_config(), cpu_config(enforce_eager=True)
    trials = [trial(), trial(max_num_seqs=2), trial(enforce_eager=True)]
    sets = fit_sets([followed(t, twin) for t in trials], twin)
    assert sets.by_key.keys() == {twin.key(plain), twin.key(other)}
    unmeasured = twin.key(cpu_config(kv_cache_dtype="fp8"))
    assert sets.of(unmeasured) == sets.shared
    calibrated = twin.with_coefficients(sets)
    result = calibrated.run(plain, WORKLOAD, MeasurePlan(), lambda _: None)
    assert isinstance(result, Measurement)
    assert result.notes["calibrated_steps"] == sets.of(twin.key(plain)).steps


def test_the_interval_holds_what_was_measured(twin: TwinEngine) -> None:
    fitted = calibrate([trial(), trial(max_num_seqs=2)], twin, key="k")
    assert fitted.ratio_interval is not None
    low, high = fitted.ratio_interval
    assert 0.9 < low <= 1.0 <= high < 1.1
    assert fitted.key == "k"


def test_too_little_data_leaves_the_catalogue(twin: TwinEngine) -> None:
    short = dataclasses.replace(trial(), workload=WORKLOAD)
    cut = dataclasses.replace(short, measurement=dataclasses.replace(short.measurement, steps=()))
    assert calibrate([cut], twin) == Coefficients()


@given(factors=st.lists(st.floats(0.0, 5.0), min_size=3, max_size=3), seed=st.integers(0, 100))
def test_exact_data_gives_the_exact_factors(factors: list[float], seed: int) -> None:
    rows = np.random.default_rng(seed).uniform(0.01, 1.0, (200, 3))
    truth = np.array(factors) + 0.1
    found = robust_nonnegative_fit(rows, rows @ truth)
    assert found == pytest.approx(truth, rel=0.05, abs=0.02)


def test_factors_are_never_negative() -> None:
    rows = np.random.default_rng(1).uniform(0.5, 1.0, (100, 3))
    target = rows @ np.array([1.0, -0.5, 0.8])
    assert (robust_nonnegative_fit(rows, np.abs(target)) >= 0).all()


def test_the_key_tells_apart_what_changes_kernels_and_nothing_else() -> None:
    cpu = find_device("cpu")
    base = calibration_key({"a": 1}, cpu, EngineConfig({"max_num_seqs": 4}))
    assert base == calibration_key({"a": 1}, cpu, EngineConfig({"max_num_seqs": 9, "dtype": "auto"}))
    assert base != calibration_key({"a": 1}, cpu, EngineConfig({"dtype": "float32"}))
    assert base != calibration_key({"a": 2}, cpu, EngineConfig({}))
    assert base != calibration_key({"a": 1}, find_device("H200"), EngineConfig({}))
    assert base != calibration_key({"a": 1}, cpu, EngineConfig({}, {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}))
    assert base == calibration_key({"a": 1}, cpu, EngineConfig({"tensor_parallel_size": 1}))


def test_eager_changes_the_kernels_of_a_cpu_and_only_the_launches_of_a_gpu() -> None:
    eager = EngineConfig({"enforce_eager": True})
    for device, same in ((find_device("cpu"), False), (find_device("A6000"), True)):
        keys = {calibration_key({}, device, config) for config in (eager, EngineConfig({}))}
        assert (len(keys) == 1) is same
