"""Fit the step-time coefficients to measured trials: robust, non-negative, and only where there is data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from objectives.measurement import Failure
from objectives.speed import mean_probe, speed_index
from tuner.config import EngineConfig
from tuner.engine.twin.devices import DeviceSpec
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial, replay
from tuner.engine.twin.steptime import COMPONENTS, Coefficients

Array = NDArray[np.float64]

MIN_AGREEMENT = 0.8
"""A replay that agrees with fewer of a trial's steps has lost its way; the trial is left out."""
MIN_STEPS = 50
"""Fewer steps than this decide nothing."""
_HUBER = 1.345
"""Huber's constant: 95% efficiency for normal residuals (Huber, Robust Statistics, 1981)."""
_ROUNDS = 25
_PRIOR_WEIGHT = 1e-3
"""Weight of the catalogue against the data: settles what the data leaves open and moves nothing else."""
_LEAST_SPREAD = 0.02
"""Share of a typical time below which residuals are not worth telling apart."""
_WINDOW_STEPS = 20
"""Residuals are judged over so many steps, since a request's times are sums over steps."""

_KERNEL_ARGS = ("dtype", "kv_cache_dtype", "quantization", "attention_backend", "tensor_parallel_size")


def calibration_key(config_json: Mapping[str, Any], device: DeviceSpec, config: EngineConfig) -> str:
    """Name what a set of coefficients holds for: model, device, and the arguments that change kernels."""
    model = hashlib.sha256(json.dumps(dict(config_json), sort_keys=True).encode()).hexdigest()[:8]
    kernels = ",".join(f"{n}={config.args[n]}" for n in _KERNEL_ARGS if config.args.get(n) not in (None, "auto"))
    return f"{model}/{device.name}/{kernels or 'default'}"


def calibrate(trials: Sequence[MeasuredTrial], twin: TwinEngine, key: str = "") -> Coefficients:
    """Fit coefficients to the steps of measured trials.

    Times are divided by each trial's speed index first, so that the set is for the reference's speed; use
    `Coefficients.scaled` to predict for another.

    Parameters
    ----------
    twin:
        An engine for the same model and device; its own coefficients are not used.

    Returns
    -------
    Coefficients
        The catalogue's set (with no interval) where fewer than `MIN_STEPS` steps of the trials can be followed.
    """
    parts = [part for trial in trials if (part := _equations(trial, twin)) is not None]
    if sum(len(measured_s) for _, measured_s in parts) < MIN_STEPS:
        return Coefficients(key=key)
    seconds_of = np.vstack([part[0] for part in parts])
    measured_s = np.concatenate([part[1] for part in parts])
    observed: NDArray[np.bool_] = np.asarray(seconds_of.any(axis=0))
    factors = np.ones(len(COMPONENTS))
    factors[observed] = robust_nonnegative_fit(seconds_of[:, observed], measured_s)
    return Coefficients(
        values=dict(zip(COMPONENTS, factors.tolist(), strict=True)),
        ratio_interval=_ratio_interval([(y, x @ factors) for x, y in parts]),
        fitted=tuple(name for name, seen in zip(COMPONENTS, observed.tolist(), strict=True) if seen),
        key=key,
        steps=len(measured_s),
    )


def calibrate_by_probe(trials: Sequence[MeasuredTrial], twin: TwinEngine, key: str = "") -> Coefficients:
    """Fit as `calibrate` does, with each trial's speed taken from its probes instead of from its `speed`.

    A first fit predicts what each configuration's probe takes on a machine of the trials' common speed; the measured
    probes over that are the trials' speeds, for a second fit. Trials without a probe count as common.
    """
    common = [replace(trial, speed=1.0) for trial in trials]
    first = twin.with_coefficients(calibrate(common, twin, key))
    speeds = [probe_speed(trial, first) or 1.0 for trial in common]
    mean = float(np.exp(np.mean(np.log(speeds)))) if speeds else 1.0
    return calibrate([replace(t, speed=s / mean) for t, s in zip(common, speeds, strict=True)], twin, key)


def probe_speed(trial: MeasuredTrial, twin: TwinEngine) -> float | None:
    """Say how many times as long everything took as when `twin` was calibrated; `None` without a probe."""
    measured = mean_probe(trial.measurement)
    predicted = twin.probe(trial.config, trial.measurement.engine.kv_tokens)
    return None if measured is None or isinstance(predicted, Failure) else speed_index(measured, predicted)


def robust_nonnegative_fit(seconds_of: Array, measured_s: Array) -> Array:
    """Find factors >= 0 with `seconds_of @ factors` close to `measured_s`, outliers counting little.

    Non-negative least squares, reweighted after Huber. Residuals are taken relative to the square root of the
    measured time: between absolute (long prefill steps decide all) and relative (short decode steps do). What the data
    leaves open is drawn towards one common factor on the catalogue.

    Parameters
    ----------
    seconds_of:
        Steps x components: the catalogue's seconds of each component.
    measured_s:
        One measured time a step, > 0.
    """
    from scipy.optimize import nnls

    scale = 1.0 / np.sqrt(measured_s)
    rows, target = seconds_of * scale[:, None], measured_s * scale
    common = float(np.median(measured_s / np.maximum(seconds_of.sum(axis=1), 1e-12)))
    prior_rows = np.diag(np.sqrt(_PRIOR_WEIGHT) * np.linalg.norm(rows, axis=0))
    prior_target = prior_rows.sum(axis=1) * common
    floor = _LEAST_SPREAD * float(np.median(target))
    weights = np.ones(len(target))
    factors = np.full(rows.shape[1], common)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        previous = factors
        factors, _ = nnls(np.vstack([rows * root[:, None], prior_rows]), np.concatenate([target * root, prior_target]))
        residuals = np.abs(target - rows @ factors)
        spread = max(1.4826 * float(np.median(residuals)), floor)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
        if np.allclose(factors, previous, rtol=1e-4, atol=1e-6):
            break
    fitted: Array = factors
    return fitted


def _equations(trial: MeasuredTrial, twin: TwinEngine) -> tuple[Array, Array] | None:
    """Return the catalogue's seconds of each component (steps x components) and the measured seconds of a trial.

    `None` for a trial that the twin cannot follow.
    """
    prepared = twin.prepare(trial.config, kv_tokens=trial.measurement.engine.kv_tokens)
    if isinstance(prepared, Failure):
        return None
    steps = replay(trial, prepared)
    if steps.agreement < MIN_AGREEMENT or not steps.loads:
        return None
    seconds_of = np.array([prepared.cost.components(load) for load in steps.loads])
    return seconds_of, np.maximum(np.array(steps.seconds) / trial.speed, 1e-6)


def _ratio_interval(parts: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """95% interval of measured over predicted time, over windows of steps of one trial."""
    ratios: list[float] = []
    for measured_s, predicted_s in parts:
        count = max(1, len(measured_s) // _WINDOW_STEPS)
        for window in np.array_split(np.arange(len(measured_s)), count):
            ratios.append(float(measured_s[window].sum() / max(predicted_s[window].sum(), 1e-12)))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)
